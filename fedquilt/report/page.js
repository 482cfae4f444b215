"use strict";
// Draws the charts of the page. Colours of text and lines follow the page by `currentColor`.
window.fedquilt = (() => {
  let shown = JSON.parse(document.getElementById("charts").textContent);
  const views = new Map(); // Views of Vega by the name of their figure
  const ink = { labelColor: "currentColor", titleColor: "currentColor" };
  const config = {
    aria: false, // The element around a chart has its text.
    background: null,
    view: { stroke: "currentColor", strokeOpacity: 0.25 },
    axis: { ...ink, gridColor: "currentColor", gridOpacity: 0.12, domainColor: "currentColor",
      tickColor: "currentColor", labelFontSize: 12, titleFontSize: 12 },
    legend: { ...ink, labelFontSize: 12, titleFontSize: 12 },
    title: { color: "currentColor" },
  };

  function names(spec) {
    const own = spec.data && spec.data.name ? [spec.data.name] : [];
    return own.concat(...(spec.layer || []).map(names));
  }

  function selects(figure) {
    return [...document.querySelectorAll("select[data-for]")]
      .filter((element) => element.dataset.for === figure);
  }

  function key(figure) {
    const chosen = shown.figures[figure].controls.map((options) => options[0]);
    for (const element of selects(figure)) chosen[Number(element.dataset.index)] = element.value;
    return chosen;
  }

  function specOf(figure) {
    const chosen = JSON.stringify(key(figure));
    const specs = shown.figures[figure].specs;
    // Python writes a space behind a comma.
    const found = Object.keys(specs).find((text) => JSON.stringify(JSON.parse(text)) === chosen);
    return specs[found];
  }

  async function draw(element) {
    const figure = element.dataset.figure;
    const spec = specOf(figure);
    const datasets = {};
    for (const name of names(spec)) datasets[name] = shown.data[name];
    const narrow = window.matchMedia("(max-width: 45rem)").matches;
    const fitted = { ...spec, width: "container", autosize: { type: "fit-x", contains: "padding" } };
    if (narrow) fitted.config = { ...spec.config, legend: { orient: "bottom", columns: 3 } };
    const old = views.get(figure);
    const result = await vegaEmbed(element, { ...fitted, datasets }, { actions: false, config,
      renderer: "svg", tooltip: { theme: "custom" } });
    if (old) old.finalize();
    // The element around the drawing has its text. Roles of single marks would have none.
    for (const part of element.querySelectorAll("svg, svg [role]")) {
      for (const name of ["role", "aria-roledescription", "aria-label"]) part.removeAttribute(name);
    }
    views.set(figure, result);
    element.dataset.drawn = JSON.stringify(key(figure));
  }

  function drawAll() {
    const elements = [...document.querySelectorAll(".chart[data-figure]")];
    return Promise.all(elements.map(draw));
  }

  document.addEventListener("change", (event) => {
    const figure = event.target.dataset && event.target.dataset.for;
    if (!figure) return;
    const element = [...document.querySelectorAll(".chart[data-figure]")]
      .find((candidate) => candidate.dataset.figure === figure);
    if (element) draw(element);
  });

  // Replace the content, and keep what the reader has chosen, opened and focused.
  async function show(content) {
    const chosen = new Map([...document.querySelectorAll("select[data-for]")]
      .map((element) => [element.id, element.value]));
    const open = [...document.querySelectorAll("details")].map((element) => element.open);
    const focused = document.activeElement && document.activeElement.id;
    for (const result of views.values()) result.finalize();
    views.clear();
    shown = content.charts;
    document.title = content.title;
    document.getElementById("content").innerHTML = content.body;
    for (const element of document.querySelectorAll("select[data-for]")) {
      const value = chosen.get(element.id);
      if ([...element.options].some((option) => option.value === value)) element.value = value;
    }
    document.querySelectorAll("details").forEach((element, index) => { element.open = open[index]; });
    await drawAll();
    if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
  }

  const ready = drawAll();
  return { show, ready, views };
})();
