"""`lamina flower` without its processes: keys, the template, what is refused, and that nothing is left behind."""

import contextlib
import datetime
import importlib
import importlib.util
import io
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console

import lamina
from lamina import BadInput, cli
from lamina.cli import flower, flower_template
from lamina.experiment.config import parse
from lamina.flower import TESTED, keys
from lamina.flower.local import federation as local
from lamina.flower.local import guard, jobs, processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["flower", *map(str, arguments)])
    return ended.value.code or 0


def mode(path):
    return path.stat().st_mode & 0o777


# --- keys ------------------------------------------------------------------------------------------------------------


def handshake(authority, trusted, host):
    """Connect to a TLS server that shows the authority's server certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.server_certificate, authority.server_key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            try:
                tls.wrap_socket(connection, server_side=True).close()
            except (ssl.SSLError, OSError):
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = ssl.create_default_context(cafile=str(trusted))
            with socket.create_connection(listener.getsockname()) as raw, client.wrap_socket(raw, server_hostname=host):
                pass
        finally:
            thread.join()


def test_the_certificate_is_good_for_its_hosts_and_no_other(tmp_path):
    made = keys.make_authority(tmp_path / "keys", ["server.example.org", "10.0.0.7"])
    for host in ("127.0.0.1", "localhost", "server.example.org", "10.0.0.7"):
        handshake(made, made.certificate, host)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"10\.0\.0\.8"):
        handshake(made, made.certificate, "10.0.0.8")
    other = keys.make_authority(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other.certificate, "127.0.0.1")


def test_secrets_are_the_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        made = keys.make_authority(tmp_path / "keys")
        private, public = keys.make_node_key(tmp_path / "keys" / "node-0")
    finally:
        os.umask(before)
    assert {mode(path) for path in (made.key, made.server_key, private)} == {0o600}
    assert mode(tmp_path / "keys") == 0o700
    assert {mode(path) for path in (made.certificate, made.server_certificate, public)} == {0o644}


def test_a_node_key_is_what_flower_takes(tmp_path):
    private, public = keys.make_node_key(tmp_path / "node-0")
    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert serialization.load_ssh_public_key(public.read_bytes()) == key.public_key()
    assert private.read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY-----")


def test_no_key_is_ever_replaced(tmp_path):
    made = keys.make_authority(tmp_path)
    before = {path: path.read_bytes() for path in made.files}
    with pytest.raises(BadInput, match=r"ca\.crt' exists: a key is never replaced"):
        keys.make_authority(tmp_path)
    keys.make_node_key(tmp_path / "node-0")
    (tmp_path / "node-0").unlink()
    with pytest.raises(BadInput, match=r"node-0\.pub' exists"):
        keys.make_node_key(tmp_path / "node-0")
    assert {path: path.read_bytes() for path in made.files} == before


@pytest.mark.parametrize("host", ["https://server", "server:8000", "a b", "", ".", "x" * 64])
def test_a_host_that_is_none(tmp_path, host):
    with pytest.raises(BadInput, match="neither a host's name nor an IP address"):
        keys.make_authority(tmp_path / "keys", [host])
    assert not (tmp_path / "keys").exists()


def test_keys_are_used_again_only_if_they_still_serve(tmp_path, monkeypatch):
    made = keys.make_authority(tmp_path / "a")
    assert keys.usable(made)
    assert not keys.usable(keys.make_authority(tmp_path / "b", days=1))  # ends within the day
    assert not keys.usable(keys.Authority(tmp_path / "nothing"))
    other = keys.make_authority(tmp_path / "c")
    made.server_key.write_bytes(other.server_key.read_bytes())
    assert not keys.usable(made)
    other.certificate.write_bytes(made.certificate.read_bytes())
    assert not keys.usable(other)


def test_the_commands_say_what_is_secret(tmp_path, capsys):
    assert call("keys", "keys", "--host", "server.example.org", "--nodes", "2") == 0
    shown = capsys.readouterr().out
    assert "secret, stays here: keys/ca.key, keys/server.key, keys/tasks.key" in shown
    assert "for every node:     keys/ca.crt, keys/tasks.pub" in shown
    assert mode(tmp_path / "keys" / "tasks.key") == 0o600
    assert "node 1: keys/node-1 is the node's secret" in shown
    assert call("node-key", "mine") == 0
    assert "secret, stays on this node: mine" in capsys.readouterr().out
    assert call("keys", "keys") == 2
    assert call("node-key", "mine") == 2


# --- the template ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--model", "small_cnn"), ("--nodes", "5")])
def test_the_template_is_a_sound_app(tmp_path, options):
    assert call("new", "My 1st-app", *options) == 0
    folder = tmp_path / "My 1st-app"
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "{{" not in text
    assert "}}" not in text
    assert str(ROOT) not in text
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    package = "my_1st_app_app"
    python = {f"{package}/{name}.py" for name in ("__init__", "data", "model", "federation")}
    assert files == {"pyproject.toml", "README.md", ".gitignore", *python}
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout

    from flwr.cli.config_utils import load_and_validate

    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert not warnings
    assert config["tool"]["flwr"]["app"]["config"] == {
        "out": "runs/my-1st-app",
        "nodes": "",
        "signing-key": "",
    }

    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(f"{package}.federation")
        clients = int(options[1]) if "--nodes" in options else 3
        assert module.federation.config()["data"]["clients"] == clients
        assert module.make_model()(module.load_test().x[:2]).shape == (2, 10)

        class Context:
            node_config = {"partition-id": 1, "num-partitions": clients}  # noqa: RUF012

        assert len(module.load_mine(Context())) == pytest.approx(1438 / clients, abs=1)
    finally:
        for name in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[name]


def test_the_settings_of_the_template_hold(tmp_path):
    """With the template's former rate of 0.03 the accuracy fell to 0.1 after 20 rounds."""
    assert call("new", "app") == 0
    sys.path.insert(0, str(tmp_path / "app"))
    try:
        module = importlib.import_module("app_app.federation")
        federation = module.federation
        train = module.load_test.__globals__["load"]("digits").train
        clients = federation.plan.clients.count
        simulation = lamina.Simulation(
            module.make_model(),
            train,
            federation.algorithm,
            test=module.load_test(),
            clients=[range(part, len(train), clients) for part in range(clients)],
            batch_size=federation.protocol.batch_size,
            epochs=federation.protocol.epochs,
            lr=federation.protocol.lr,
            device="cpu",
            evaluate_every=22,
        )
        simulation.run(22)
    finally:
        for name in [name for name in sys.modules if name.startswith("app_app")]:
            del sys.modules[name]
    assert simulation.history.last() > 0.9


def test_the_template_is_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["lamina"]
    package = ROOT / "src" / "lamina"
    shipped = {path for pattern in globs for path in package.glob(pattern)}
    template = {path for path in (package / "flower" / "template").rglob("*") if path.is_file()}
    assert template
    assert template <= shipped


def test_the_readme_installs_the_flower_that_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["flower"] == [f"flwr=={flower_template.FLWR}"]
    assert TESTED == flower_template.FLWR


def test_no_text_tells_to_open_the_control_interface():
    """The template's README and the docs give the same commands for three machines."""
    readme = (ROOT / "src" / "lamina" / "flower" / "template" / "README.md.in").read_text()
    docs = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    for text in (readme, docs):
        started = re.findall(r"^flower-superlink (?!.*--simulation)(.*)$", text, flags=re.MULTILINE)
        assert [line.split()[:4] for line in started] == [["--host", "127.0.0.1", "--port", "8001"]]
        assert 'address = "127.0.0.1:8001"' in text
        assert "--superlink server.example.org:8000" in text
        assert "0.0.0.0" not in text.replace("do not let the SuperLink listen on `0.0.0.0`", "")
        assert "/v1/fleet/" in text
        for part in (
            "umask 077",
            "mkdir -p",
            'data=\\"',
            'server-key=\\"',
            'signing-key=\\"',
            "--port 9094",
            "lamina watch",
        ):
            assert part in text, part
    assert "proxy_pass https://127.0.0.1:8001;" in docs
    assert "listen 8000 ssl;" in docs


def test_new_refuses(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for arguments, said in (
        (["full"], "'full' is not an empty folder"),
        (["a", "--model", "mpl"], "unknown model 'mpl'; did you mean 'mlp'?"),
        (["a", "--data", "digit"], "unknown data set 'digit'; did you mean 'digits'?"),
    ):
        assert call("new", *arguments) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert not (tmp_path / "a").exists()


# --- up --------------------------------------------------------------------------------------------------------------

TOML = '[data]\nclients = 20\n[model]\nname = "mlp"\nhidden = 8\n[train]\nrounds = 2\n'


def test_up_refuses_before_anything_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local.LocalFederation, "start", lambda self: pytest.fail("started"))
    (tmp_path / "small.toml").write_text(TOML)
    (tmp_path / "empty").mkdir()
    app = '[project]\nname = "a"\n[tool.flwr.app.config]\nout = ""\n'
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "pyproject.toml").write_text(app)
    for arguments, said in (
        (["none.toml"], "cannot read the experiment file"),
        (["small.toml"], "20 clients, and every client is a node: give --nodes 20, or --set data.clients=3"),
        (["small.toml", "--nodes", "20", "--set", "algorithm.name=fedlam"], "did you mean 'fedlamb'?"),
        (["empty"], "'empty' is not the folder of a Flower app"),
        (["half"], '[tool.flwr.app.config] lacks nodes = "", signing-key = ""'),
        (
            ["small.toml", "--set", "data.clients=3", "--quorum", "7"],
            "quorum = 7 of 3 clients can never answer: give at most 3",
        ),
        (["half", "--set", "train.lr=1"], "--set, --deadline and --quorum are for experiment files"),
    ):
        assert call("up", *arguments) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_flower_that_is_not_installed_is_one_line(tmp_path, capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "flwr" else real(name, *a))
    (tmp_path / "small.toml").write_text(TOML)
    for arguments in (["up", "small.toml"], ["keys", "keys"], ["node-key", "mine"]):
        assert call(*arguments) == 2
        assert capsys.readouterr().err == "error: lamina flower needs flwr: pip install -e '.[flower]'\n"
    assert call("new", "app") == 0  # the template needs none


def test_the_command_line_does_not_import_flower():
    """Nor does `import lamina`, which is part of it."""
    code = "import sys, lamina.cli; sys.exit('flwr' in sys.modules or 'cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shim_builds_the_federation(tmp_path):
    spec = parse({"data": {"clients": 3}, "model": {"name": "mlp", "hidden": 8}, "train": {"rounds": 7, "lr": 0.5}})
    number = 2**64 - 1  # as long as Flower's get
    jobs.write_app(tmp_path / "app", spec, Path("out"), {number: 2, 5: 0, 6: 1}, {"deadline": 9.0, "quorum": 2})
    scope = {"__file__": str(tmp_path / "app" / "lamina_up" / "__init__.py"), "__name__": "lamina_up"}
    exec((tmp_path / "app" / "lamina_up" / "__init__.py").read_text(), scope)
    made = scope["federation"]
    config = made.config()
    assert (config["train"]["rounds"], config["train"]["lr"], config["data"]["clients"]) == (7, 0.5, 3)
    assert made.deadline == 9.0
    assert scope["nodes"] == {number: 2, 5: 0, 6: 1}
    assert scope["settings"]["out"] == str(tmp_path / "out")


def test_what_is_shown_as_it_goes(tmp_path, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(flower, "err", Console(file=shown, width=200))
    job = jobs.Job(tmp_path / "run", 3)
    display = flower.Display(job, quiet=False)
    with display:
        display.say("starting")
        display.update()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "log.txt").write_text(
            "2026-11-15 11:00:00,123 INFO waiting for nothing\n"
            "2026-11-15 11:00:01,123 WARNING waiting for clients 1, 2 to connect (deadline: 600 s)\n"
            "2026-11-15 11:00:02,123 WARNING round 1: client 1: it is [not] connected\n"
            "2026-11-15 11:00:03,123 WARNING no node is listed for client 2: it takes no part\n"
        )
        display.update()
        with (tmp_path / "run" / "log.txt").open("a") as file:
            file.write("2026-11-15 11:00:04,123 WARNING round 1: node 7: refused: it is a stranger\n2026-11-15 11:")
        (tmp_path / "run" / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n')
        display.update()
        display.update()
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"round": 2, "loss": 0.1}\n{"round"')
        display.update()
    assert shown.getvalue().splitlines() == [
        "starting",
        "waiting for clients 1, 2 to connect (deadline: 600 s)",
        "round 1: client 1: it is [not] connected",
        "no node is listed for client 2: it takes no part",
        "round 1: node 7: refused: it is a stranger",
        "round 1/3: accuracy 0.5000",
        "round 2/3",
    ]
    quiet = flower.Display(job, quiet=True)
    with quiet:
        quiet.say("starting")
        quiet.update()
    assert shown.getvalue().count("\n") == 7


@pytest.mark.parametrize(("text", "quorum"), [("0.5", 0.5), ("1.0", 1.0), ("2", 2), ("1", 1)])
def test_a_quorum_is_what_it_is_for_the_federation(text, quorum):
    assert flower.read_quorum(text) == quorum
    assert type(flower.read_quorum(text)) is type(quorum)


@pytest.mark.parametrize("text", ["0", "1.5", "-1", "nan", "half", "2.0"])
def test_a_quorum_that_is_none(text, capsys, tmp_path):
    (tmp_path / "small.toml").write_text(TOML)
    assert call("up", "small.toml", f"--quorum={text}") == 2
    assert f"--quorum {text}: give a part" in capsys.readouterr().err


def test_an_app_that_has_nothing_left_to_do_is_complete(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local, "LocalFederation", Finished)
    assert call("new", "app", "--nodes", "1") == 0
    (tmp_path / "runs" / "app").mkdir(parents=True)
    (tmp_path / "runs" / "app" / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n')
    capsys.readouterr()
    assert call("up", "app", "--nodes", "1") == 0
    assert "runs/app/ is complete: 1 round" in capsys.readouterr().out


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_run_that_failed_is_one_line(tmp_path, rounds):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"round": {n + 1}}}\n' for n in range(rounds)))
    status = local.RunStatus("finished:failed", "ServerApp failed with exception: too few", 0, 0)
    failed = jobs.Job(tmp_path, 3).failed(status, Path("logs"), "run it again")
    assert isinstance(failed, processes.FederationFailed)
    kept = "2 rounds are kept; run it again; " if rounds else ""
    assert str(failed) == f"the run failed: too few ({kept}logs: logs/)"


class Finished:
    """Stands for a federation on which every run is complete at once."""

    node_ids, signing_key = {7: 0}, Path("tasks.key")

    def __init__(self, folder, *arguments, **options):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, app, run_config):
        return 1

    def wait(self, run, tick):
        return local.RunStatus("finished:completed", "", 0, 0)


def test_overwriting_removes_a_run_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "LocalFederation", Finished)
    assert call("new", "app", "--nodes", "1") == 0
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "federation.jsonl", "mine.txt"):
        (run / name).write_text('{"lamina": "1"}')
    assert call("up", "app", "--nodes", "1", "--out", "run", "--overwrite", "--quiet") == 0
    assert [path.name for path in run.iterdir()] == ["mine.txt"]
    (run / "metrics.jsonl").write_text("not lamina's")
    assert call("up", "app", "--nodes", "1", "--out", "run", "--overwrite", "--quiet") == 0
    assert (run / "metrics.jsonl").exists()


# --- processes -------------------------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, __file__], start_new_session=sys.argv[1] == "escape")
print("ready", flush=True)
time.sleep(60)
"""


def gone(pid):
    """Whether a process has ended; one that nobody has waited for yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(true, seconds=20):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_process_is_stopped_with_its_group(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    environment = {**os.environ, guard.VARIABLE: "stopped-with-its-group"}
    command = [sys.executable, str(tmp_path / "stubborn.py"), "child"]
    process = processes.Process("stubborn", command, tmp_path / "log", environment)
    wait_until(lambda: process.output().count("ready") == 2)
    pids = guard.marked("stopped-with-its-group")
    assert len(pids) == 2
    assert {os.getpgid(pid) for pid in pids} == {process.pid}
    process.stop(grace=0.1)
    assert process.ended == -signal.SIGKILL
    wait_until(lambda: all(map(gone, pids)))


@pytest.mark.skipif(not Path("/proc").exists(), reason="knows processes by /proc")
def test_the_guard_ends_what_its_owner_leaves(tmp_path):
    """Also what has escaped into a session of its own and does not listen."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "owner.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from lamina.flower.local.processes import Processes\n"
        "processes = Processes(Path('fed'), 1)\n"
        "(processes.folder / 'logs').mkdir(parents=True)\n"
        "processes.start_guard()\n"
        f"processes.launch('node', [{sys.executable!r}, 'stubborn.py', 'escape'], 'node')\n"
        "print(processes.mark, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "owner.py"], stdout=subprocess.PIPE, text=True)
    mark = owner.stdout.readline().strip()
    wait_until(lambda: len(guard.marked(mark)) == 2)
    pids = guard.marked(mark)
    assert len({os.getsid(pid) for pid in pids}) == 2
    owner.kill()
    owner.communicate()
    wait_until(lambda: all(map(gone, pids)))


def test_a_federation_that_fails_says_why_in_one_line(tmp_path, monkeypatch):
    real = processes.executable
    false = [sys.executable, "-c", "print('INFO: hello'); raise SystemExit('OSError: no such thing')"]
    monkeypatch.setattr(processes, "executable", lambda name: false[0] if "superlink" in name else real(name))
    monkeypatch.setattr(
        processes, "Process", lambda name, command, *more: REAL(name, false if name == "superlink" else command, *more)
    )
    federation = local.LocalFederation(tmp_path / "fed", 2)
    log = tmp_path / "fed" / "logs" / "superlink.log"
    with pytest.raises(processes.FederationFailed) as failed, federation:
        pytest.fail("started")
    assert str(failed.value) == f"the SuperLink ended with code 1: OSError: no such thing (log: {log})"
    assert guard.marked(federation.processes.mark) == []


REAL = processes.Process


def test_what_processes_write_is_their_owners_alone(tmp_path):
    folder = tmp_path / "fed"
    folder.mkdir(mode=0o755)
    (folder / "superlink").mkdir(mode=0o755)
    federation = local.LocalFederation(folder, 1, secure=False)
    federation._start_superlink = lambda: federation.processes.launch(
        "superlink",
        [sys.executable, "-c", "import os; open('db', 'w'); os.mkdir('dir'); print('SuperNode ID: 7', flush=True)"],
        "superlink",
    )
    federation.start_supernode = lambda name, settings: federation._start_superlink()
    with contextlib.chdir(folder), federation:
        wait_until((folder / "dir").exists)
        assert {mode(path) for path in (folder / "db", folder / "logs" / "superlink.log")} == {0o600}
        assert {mode(path) for path in (folder, folder / "superlink", folder / "dir", folder / "logs")} == {0o700}
        assert mode(federation.signing_key) == 0o600


def test_up_writes_for_its_owner_alone():
    before = os.umask(0o022)
    try:
        with processes.private_files():
            assert os.umask(0o077) == 0o077
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_nodes_get_the_key_that_tasks_are_verified_with(tmp_path, monkeypatch):
    federation = local.LocalFederation(tmp_path / "fed", 1)
    started = {}
    monkeypatch.setattr(federation, "start_supernode", lambda name, settings: started.update(settings))
    federation.start_node(0)
    assert started["server-key"] == str(tmp_path / "fed" / "keys" / "tasks.pub")
    assert federation.signing_key == tmp_path / "fed" / "keys" / "tasks.key"


def test_a_federation_is_run_by_one_command_at_a_time(tmp_path):
    first = local.Lock(keys.private_folder(tmp_path / "fed"))
    with pytest.raises(BadInput, match="is writing to the folder"), local.LocalFederation(tmp_path / "fed", 1):
        pytest.fail("started")
    first.release()


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        federation = local.LocalFederation(tmp_path / "fed", 1, port=port)
        with pytest.raises(BadInput, match=f"port {port} is in use"), federation:
            pytest.fail("started")
    assert not (tmp_path / "fed").exists()


def test_processes_that_have_ended_are_forgotten(tmp_path, monkeypatch):
    """Their numbers may be used again: neither the guard nor the federation's end may signal them."""
    group = processes.Processes(tmp_path / "fed", 1)
    (group.folder / "logs").mkdir(parents=True)
    group._guard = SimpleNamespace(stdin=io.StringIO(), wait=lambda: None)
    process = group.launch("node", [sys.executable, "-c", ""], "node")
    wait_until(lambda: process.ended == 0)
    group.retire(process)
    assert group._guard.stdin.getvalue() == f"+{process.pid}\n-{process.pid}\n"
    monkeypatch.setattr(processes.os, "killpg", lambda *_: pytest.fail("signalled"))
    process.kill()
    process.stop()
    group.close()


def test_a_follower_and_a_node_that_ended_are_forgotten(tmp_path, monkeypatch):
    federation = local.LocalFederation(tmp_path / "fed", 1)
    (federation.folder / "logs").mkdir(parents=True)
    status = local.RunStatus("finished:completed", "", 0, 0)
    ends, launch = [sys.executable, "-c", ""], federation.processes.launch
    monkeypatch.setattr(federation, "follow", lambda run: launch("run", ends, "command"))
    monkeypatch.setattr(federation, "status", lambda run: status)
    monkeypatch.setattr(federation, "start_supernode", lambda name, settings: launch(name, ends, "node"))
    assert federation.wait(7, every=0.01) == status
    assert federation.processes.running == []
    first = federation.start_node(0)
    wait_until(lambda: first.ended == 0)
    federation.tend()
    assert first not in federation.processes.running
    assert federation.nodes[0] in federation.processes.running
    federation.close()


def test_the_guard_forgets_groups_that_have_ended(monkeypatch):
    ended = []
    monkeypatch.setattr(guard, "end_all", lambda groups, mark: ended.extend(groups))
    monkeypatch.setattr(guard.signal, "signal", lambda *_: None)
    monkeypatch.setattr(guard.sys, "stdin", io.StringIO("+5\n+6\n-5\n"))
    guard.main("mark")
    assert ended == [6]


def test_the_environment_keeps_flower_off_the_network(tmp_path):
    made = processes.Processes(tmp_path, 1).environment("node-0")
    assert made["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert made["PATH"].startswith(str(Path(sys.executable).parent))
    assert made["FLWR_HOME"] == str(tmp_path / "node-0")


def test_answers_of_the_flwr_command():
    assert local.json_in('Loading…\n{"success": true, "run-id": "7"}\n') == {"success": True, "run-id": "7"}
    assert local.json_in("no json { here") == {}
    assert local.json_in("[1]") == {}


def test_how_long_certificates_last(tmp_path):
    from cryptography import x509

    made = keys.make_authority(tmp_path)
    server = x509.load_pem_x509_certificate(made.server_certificate.read_bytes())
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=364) < left <= datetime.timedelta(days=365)
