"""The configurations of nginx and Caddy on the page of deployments, run as they are written."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")
import httpx

from fedquilt.deployment.gate import OpenGate
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.deployment.processes import free_port
from tests.unit.deployment.test_gate import SEEN, superlink

PAGE = Path(__file__).parents[3] / "docs" / "deployment.md"
NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
access_log off;
client_body_temp_path {folder}/body;
proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/fastcgi;
uwsgi_temp_path {folder}/uwsgi;
scgi_temp_path {folder}/scgi;
{server}
}}
"""


def configuration(language: str, port: int, behind: int, keys: KeyFolder) -> str:
    """Return a configuration of the page with other ports and with the folder of the keys."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = text.replace("9092", str(port)).replace("127.0.0.1:8000", f"127.0.0.1:{behind}")
    return text.replace("keys/", f"{keys.path}/")


def command(program: str, path: str, folder: Path, text: str) -> list[str]:
    """Write the configuration of a program, and return the command that runs it."""
    file = folder / "configuration"
    if program == "nginx":
        file.write_text(NGINX.format(folder=folder, server=text))
        return [path, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(file)]
    file.write_text(text)
    return [path, "run", "--adapter", "caddyfile", "--config", str(file)]


def wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    """Wait until a program answers."""
    end = time.monotonic() + 20
    while True:
        assert process.poll() is None, "it has ended"
        try:
            client.get("/")
            return
        except httpx.TransportError:
            assert time.monotonic() < end, "it does not answer"
            time.sleep(0.1)


@pytest.mark.parametrize("program", ["nginx", "caddy"])
def test_other_servers_refuse_what_the_gate_refuses(program, tmp_path):
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        pytest.skip(f"{program} is not installed")
    make_keys(tmp_path / "keys", 1)
    keys = KeyFolder(tmp_path / "keys")
    SEEN.clear()
    context = ssl.create_default_context(cafile=str(keys.ca))
    port = free_port()
    with OpenGate(superlink(), certificate=(keys.server, keys.server_key)) as behind:  # type: ignore[arg-type]
        text = configuration(program, port, behind.port, keys)
        process = subprocess.Popen(
            command(program, path, tmp_path, text), env={"HOME": str(tmp_path)}
        )
        url = f"https://localhost:{port}"
        try:
            with httpx.Client(verify=context, base_url=url, trust_env=False) as client:
                wait_for(client, process)
                check(client)
                plain = httpx.Client(base_url=f"http://localhost:{port}", trust_env=False)
                assert plain.post("/v1/fleet/pull-messages").status_code == 400
                plain.close()
        finally:
            process.terminate()
            process.wait(20)


def check(client: httpx.Client) -> None:
    """Compare a server's answers with those of the gate."""
    signed = {"flwr-timestamp": "now"}
    passed = client.post("/v1/fleet/pull-messages", content=b"abc", headers=signed)
    assert (passed.status_code, passed.content, passed.headers["x-echo"]) == (200, b"cba", "now")
    largest = client.post("/v1/fleet/push-object", content=bytes(8 << 20))
    assert largest.status_code == 200
    assert client.post("/v1/fleet/push-object", content=bytes((8 << 20) + 1)).status_code == 413
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleet/"):
        assert client.post(path).status_code == client.get(path).status_code == 404
    for path in ("/v1/fleet/a/../../control/start-run", "/v1/fleet/%2e%2e/control/start-run"):
        assert client.post(path).status_code in (400, 404)
    for method in ("GET", "PUT", "DELETE"):
        assert client.request(method, "/v1/fleet/pull-messages").status_code == 404
    # A server may pass the beginning of a body before it refuses the rest.
    assert {path for _, path, _ in SEEN} == {"/v1/fleet/pull-messages", "/v1/fleet/push-object"}
