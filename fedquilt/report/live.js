"use strict";
// Shows the newest content of a live page. Events that arrive meanwhile lead to one more request.
(() => {
  const status = document.getElementById("live");
  let busy = false;
  let again = false;

  async function update() {
    if (busy) { again = true; return; }
    busy = true;
    do {
      again = false;
      try {
        const response = await fetch("content.json" + window.location.search, { cache: "no-store" });
        if (!response.ok) throw new Error(`status ${response.status}`);
        await window.fedquilt.show(await response.json());
        status.textContent = `Updated at ${new Date().toLocaleTimeString()}.`;
      } catch (error) {
        status.textContent = `The last update failed (${error.message}). It is tried again.`;
      }
    } while (again);
    busy = false;
  }

  const events = new EventSource("events" + window.location.search);
  events.onmessage = update;
  events.addEventListener("problem", (event) => {
    status.textContent = `The newest files cannot be shown: ${event.data}`;
  });
  events.onerror = () => { status.textContent = "The connection is lost. It is tried again."; };
})();
