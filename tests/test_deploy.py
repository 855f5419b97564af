"""The files in deploy/, as far as they can be checked without a Docker engine and a cluster."""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lamina.cli import command_line
from lamina.flower.internals import parse_node_config
from lamina.flower.keys import ServerKeys

yaml = pytest.importorskip("yaml")  # Flower's, and so in `make test`

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHARTS = ("server", "node")
SERVER_FILES = {path.name for path in vars(ServerKeys(Path())).values()}


def rendered(chart):
    """The objects of a chart whose templates only name values."""
    folder = DEPLOY / "kubernetes" / chart
    values = yaml.safe_load((folder / "values.yaml").read_text())
    used = set()

    def value(match):
        scope, name = match.groups()
        used.add(name)
        return "a-release" if scope == "Release" else str(values[name])

    text = "".join(path.read_text() for path in sorted((folder / "templates").glob("*.yaml")))
    objects = list(yaml.safe_load_all(re.sub(r"\{\{ \.(Release|Values)\.(\w+) \}\}", value, text)))
    assert used - {"Name"} == values.keys()
    assert "{{" not in str(objects)
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def commands():
    """Every command of Flower's and ours in deploy/, by the file it is in, as words."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        given = service.get("command", [])
        yield f"compose {name}", shlex.split(given) if isinstance(given, str) else given
    script = compose["services"]["keys"]["command"][-1].replace("$$", "")
    for words in re.findall(r"(lamina .*)$", script, flags=re.MULTILINE):
        yield "compose keys", shlex.split(words)
    for unit in sorted(DEPLOY.glob("systemd/*.service")):
        (line,) = re.findall(r"^ExecStart=/opt/lamina/bin/(.*)$", unit.read_text().replace("\\\n", ""), re.MULTILINE)
        yield unit.name, shlex.split(line)
    for chart in CHARTS:
        spec = rendered(chart)["Deployment", "a-release"]["spec"]["template"]["spec"]
        yield f"kubernetes {chart}", spec["containers"][0]["args"]
    for path in (DEPLOY / "compose.yaml", DEPLOY / "systemd" / "lamina-supernode.service", DEPLOY / "README.md"):
        text = path.read_text().replace("\\\n", " ")
        for words in re.findall(
            r"^(?:#|\$)? *(?:Try it before: )?((?:lamina|flwr) [a-z].*)$", text, flags=re.MULTILINE
        ):
            yield path.name, shlex.split(words, comments=True)


def parsers():
    """Flower's own parsers of the two programs' options."""
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    return {"flower-superlink": _parse_args_run_superlink(), "flower-supernode": _parse_args_run_supernode()}


def test_the_programs_and_flags_in_deploy_exist():
    flower = parsers()
    counts = dict.fromkeys([*flower, "lamina"], 0)
    for place, words in commands():
        program = words[0] if words else ""
        if program in flower:
            parsed = flower[program].parse_args(words[1:])  # exits if a flag does not exist
            assert not parsed.insecure, place
        elif program == "lamina":
            context = click.Context(command_line(), info_name="lamina")
            rest = words[1:]
            while isinstance(context.command, click.Group):
                context = click.Context(context.command.commands[rest.pop(0)], parent=context)
            with contextlib.suppress(click.exceptions.Exit):
                context.command.parse_args(context, rest)
        if program in counts:
            counts[program] += 1
    assert counts["flower-superlink"] == 3
    assert counts["flower-supernode"] == 5
    assert counts["lamina"] >= 4


def option(words, name):
    """The value of an option, given as one word or as two."""
    joined = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return joined[0] if joined else words[words.index(name) + 1]


def test_no_superlink_listens_beyond_its_own_machine():
    for place, words in commands():
        if words and words[0] in ("flower-superlink", "flower-supernode"):
            assert option(words, "--host") == "127.0.0.1", place
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert not any("ports" in service for service in compose["services"].values())
    ports = rendered("server")["Service", "a-release"]["spec"]["ports"]
    assert [port["targetPort"] for port in ports] == [8000]  # nginx's


def test_nodes_are_configured_as_lamina_reads_it():
    unit = (DEPLOY / "systemd" / "lamina-supernode.service").read_text()
    (in_unit,) = re.findall(r"^#   NODE_CONFIG='(.*)'$", unit, re.MULTILINE)
    configs = [option(words, "--node-config") for _, words in commands() if words and words[0] == "flower-supernode"]
    assert configs.count("${NODE_CONFIG}") == 1
    read = [parse_node_config(text) for text in [*configs, in_unit] if not text.startswith("$")]
    assert sorted(one["partition-id"] for one in read) == [0, 0, 0, 1, 2]
    for one in read:
        assert one["num-partitions"] == 3
        assert one["server-key"].endswith("/tasks.pub")
        assert one["state-dir"].startswith("/")


def test_the_proxy_is_the_same_everywhere():
    config = (DEPLOY / "nginx.conf").read_text()
    assert f"```nginx\n{config}```" in (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    in_chart = rendered("server")["ConfigMap", "a-release"]["data"]
    assert in_chart == {"nginx.conf": config, "config.toml": (DEPLOY / "flwr.toml").read_text()}
    assert config.count("location") == 2
    assert "location / { return 403; }" in config
    named = set(re.findall(r"/etc/lamina/([\w.]+)", config))
    assert named <= SERVER_FILES


def test_every_mounted_file_and_volume_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).is_file(), name
            elif not source.startswith("${"):
                assert source in compose["volumes"], name
        assert set(service.get("depends_on", {})) <= compose["services"].keys()
    nodes = [service for name, service in compose["services"].items() if name.startswith("node-")]
    assert len(nodes) == 3
    assert all("keys:" not in str(node["volumes"]) for node in nodes)  # the server's secrets


@pytest.mark.parametrize("chart", CHARTS)
def test_the_parts_of_a_chart_fit_together(chart):
    objects = rendered(chart)
    deployment = objects["Deployment", "a-release"]["spec"]
    pod = deployment["template"]["spec"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert yaml.safe_load((DEPLOY / "kubernetes" / chart / "Chart.yaml").read_text())["apiVersion"] == "v2"


def test_the_image_has_what_the_commands_need():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [word for words in re.findall(r"^COPY (.*) \S+$", lines, re.MULTILINE) for word in words.split()]
    assert all((ROOT / name).exists() for name in copied)
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert all(f"!{name}" in kept for name in copied)
    assert ".[flower]" in lines
    assert "USER 1000" in lines


def test_register_writes_the_table_of_nodes_once(tmp_path):
    """With a stand-in for flwr, which prints a line before its JSON as flwr does."""
    flwr = tmp_path / "flwr"
    flwr.write_text(
        f"#!{sys.executable}\nimport sys\nassert sys.argv[1:3] == ['supernode', 'register']\n"
        "assert sys.argv[4:] == ['federation', '--format', 'json']\nprint('Using SuperLink: federation')\n"
        "node = {'a.pub': '18446744073709551615', 'b.pub': '7'}.get(sys.argv[3])\n"
        'print(f\'{{"success": true, "node-id": "{node}"}}\' if node else '
        '\'{"success": false, "error-message": "Public key already in use."}\')\n'
    )
    flwr.chmod(0o755)

    def register(*keys):
        command = [sys.executable, DEPLOY / "register.py", "nodes.json", *keys]
        return subprocess.run(
            command, cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
        )

    failed = register("a.pub", "c.pub")
    assert failed.returncode == 1
    assert failed.stderr == "cannot register c.pub: Public key already in use.\n"
    assert not (tmp_path / "nodes.json").exists()
    for keys in (["a.pub", "b.pub"], ["c.pub"]):  # the second time nothing is done
        assert register(*keys).returncode == 0
        assert (tmp_path / "nodes.json").read_text() == '{"18446744073709551615": 0, "7": 1}'
