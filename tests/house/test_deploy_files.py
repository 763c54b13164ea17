"""deploy/: what is there loads, is of the schemas of Kubernetes, and starts commands that exist."""

import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from test_doc_commands import EXTRAS, ROOT, check_specserve, find

from specserve.serve.settings import ServeRun

DEPLOY = ROOT / "deploy"
HELM = DEPLOY / "helm"
KUBERNETES = "1.31"
VARIABLES = {  # set in pods by the operators, and in its nodes by SkyPilot
    "lws": {"LWS_LEADER_ADDRESS": "specserve-0.specserve", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"},
    "jobset": {"JOB_COMPLETION_INDEX": "1"},
    "skypilot": {"first": "10.0.0.1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
}


def render(text: str, scope: dict[str, Any]) -> str:
    """What helm makes of a template that does nothing but name values, plainly or with `toJson`. Of all others it is a
    KeyError."""

    def value(match: re.Match[str]) -> str:
        found: Any = scope
        for name in match["path"].split("."):
            found = found[name]
        return json.dumps(found) if match["json"] else str(found)

    rendered = re.sub(r"\{\{ (?P<json>toJson )?\.(?P<path>[\w.]+) \}\}", value, text)
    assert "{{" not in rendered, "helm knows more than these tests do; keep to values"
    return rendered


def _without_null(value: Any) -> Any:
    """As Kubernetes reads it: a field that is null is not there."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def chart(**changes: Any) -> list[dict[str, Any]]:
    values = yaml.safe_load((HELM / "values.yaml").read_text()) | changes
    scope = {"Values": values, "Release": {"Name": "mine"}}
    templates = sorted((HELM / "templates").iterdir())
    return [_without_null(yaml.safe_load(render(file.read_text(), scope))) for file in templates]


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of Kubernetes, by file; of the operators' own kinds, the pods and jobs in them."""
    for shared in (
        {"emptyDir": {}, "persistentVolumeClaim": None},
        {"emptyDir": None, "persistentVolumeClaim": {"claimName": "c"}},
    ):
        yield from (("helm", each) for each in chart(cache=shared))
    for file in sorted(DEPLOY.glob("*-*pu.yaml")):
        for each in yaml.safe_load_all(file.read_text()):
            spec = each["spec"]
            if each["kind"] == "LeaderWorkerSet":
                group = spec["leaderWorkerTemplate"]
                for role in ("leader", "worker"):
                    yield (
                        file.name,
                        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role}} | group[f"{role}Template"],
                    )
            elif each["kind"] == "JobSet":
                for job in spec["replicatedJobs"]:
                    yield (
                        file.name,
                        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}} | job["template"],
                    )
            else:
                yield file.name, each
    cluster = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for number, group in enumerate((cluster["headGroupSpec"], *cluster["workerGroupSpecs"])):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"group-{number}"}} | group["template"]
        yield "rayservice.yaml", pod


def test_a_ray_service_is_what_the_command_above_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Its pods have what Ray is to give each replica, as many as there may be, and open the port that it listens on."""
    text = (DEPLOY / "rayservice.yaml").read_text()
    [service] = yaml.safe_load_all(text)
    spec = service["spec"]
    said = re.search(r"^#   specserve (.*\n(?:#   .*\n)*)", text, re.M)
    assert said is not None
    command, _, rest = find(shlex.split(said[1].replace("#", "")))
    command.main(rest, standalone_mode=False)
    assert spec["serveConfigV2"] == capsys.readouterr().out
    served = yaml.safe_load(spec["serveConfigV2"])
    run = ServeRun(**served["applications"][0]["args"])
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert f"cpu={limits['cpu']},gpu={limits['nvidia.com/gpu']}" == run.replica_resources
    assert (group["minReplicas"], group["maxReplicas"]) == (run.min_replicas, run.max_replicas)
    assert container["ports"] == [{"name": "serve", "containerPort": served["http_options"]["port"]}]
    assert served["http_options"]["host"] == "0.0.0.0"


def _pod(each: dict[str, Any]) -> dict[str, Any] | None:
    return each["spec"] if each["kind"] == "Pod" else each["spec"].get("template", {}).get("spec")


def test_objects_are_of_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'specserve[dev]' brings it")
    for name, each in objects():
        try:
            validate.validate(each, KUBERNETES, strict=True)
        except validate.ValidationError as error:
            pytest.fail(f"{name}, {each['kind']}: {error.message} at {list(error.path)}", pytrace=False)


@pytest.mark.skipif(not shutil.which("helm"), reason="helm is not here")
def test_helm_finds_nothing_wrong_and_renders_the_same() -> None:
    subprocess.run(["helm", "lint", "--strict", str(HELM)], check=True)
    rendered = subprocess.run(
        ["helm", "template", "mine", str(HELM)], check=True, capture_output=True, text=True
    ).stdout
    by_kind = {each["kind"]: _without_null(each) for each in yaml.safe_load_all(rendered)}
    assert by_kind == {each["kind"]: each for each in chart()}


def commands() -> Iterator[tuple[str, list[str]]]:
    """What every container and every node runs, as words, with the variables that it finds there."""
    for name, each in objects():
        for container in (_pod(each) or {}).get("containers", ()):
            if name == "rayservice.yaml":  # of which KubeRay writes the commands
                continue
            words = [*container["command"], *container.get("args", ())]
            yield name, _words(words[2], name) if words[:2] == ["sh", "-c"] else words
    for file in sorted(DEPLOY.glob("skypilot*.yaml")):
        yield file.name, _words(yaml.safe_load(file.read_text())["run"], file.name)
    docker = (DEPLOY / "Dockerfile").read_text()
    yield (
        "Dockerfile",
        [word for line in re.findall(r"^(?:ENTRYPOINT|CMD) (.+)$", docker, re.M) for word in json.loads(line)],
    )


def _words(script: str, name: str) -> list[str]:
    """Of a script, its last command. A run goes on where there is one, and begins where there is none."""
    script, count = re.subn(r"\$\(test -f (\S+)/run\.yaml && echo --resume\)", "--resume", script)
    assert count == ("specserve train" in script), "a first start has nothing to resume"
    script = script.replace("$((SKYPILOT_NUM_NODES * SKYPILOT_NUM_GPUS_PER_NODE))", "16")
    for variable, value in VARIABLES[re.split(r"\W", name)[0]].items():
        script = script.replace(f"${variable}", value)
    line = re.search(r"^exec (specserve .*)", script.replace("\\\n", " "), re.M | re.S)
    assert line is not None, script
    assert "$" not in line[1], f"{line[1]}: a variable that nobody sets"
    return shlex.split(line[1])


@pytest.mark.parametrize(("name", "words"), list(commands()), ids=str)
def test_commands_are_those_of_this_version(name: str, words: list[str]) -> None:
    """Flags and values are parsed as when they run. A server listens to more than its own container."""
    assert words[0] == "specserve"
    check_specserve(words[1:])
    if words[1] == "train":  # its settings must also go together
        command, _, rest = find(words[1:])
        command.main([*rest, "--dry-run"], standalone_mode=False)
    said = " ".join(words).replace("=", " ")
    if words[1] == "serve":
        assert "--host 0.0.0.0" in said
        assert ("--port " in said) <= (f"--port {ServeRun().port}" in said)


@pytest.mark.slow
def test_the_images_command_starts_a_server(tmp_path: Path) -> None:
    """What a container runs, as a process with the image's variables: it gets ready on the image's port, answers, and
    ends in order when it is asked to stop. The port is moved to a free one here, and /cache into a folder."""
    docker = (DEPLOY / "Dockerfile").read_text()
    [entry], [given] = (re.findall(rf"^{word} (.+)$", docker, re.M) for word in ("ENTRYPOINT", "CMD"))
    variables = dict(pair.split("=") for line in re.findall(r"^ENV (.+)$", docker, re.M) for pair in line.split())
    assert re.findall(r"^EXPOSE (\d+)$", docker, re.M) == [str(ServeRun().port)]
    assert all(value.startswith("/cache") for value in variables.values())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*json.loads(entry), *json.loads(given), "--port", str(port)],
        env=os.environ | {name: f"{tmp_path}{value}" for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            while process.poll() is None and not _is_ready(http):
                time.sleep(0.2)
            assert process.poll() is None, process.communicate()[0]
            reply = http.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
            )
            assert reply.json()["usage"]["completion_tokens"] == 4
        process.terminate()  # as `docker stop`
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0, said
        assert "Traceback" not in said
        assert any((tmp_path / "cache").rglob("*")), "nothing is kept for the next start"
    finally:
        process.kill()
        process.communicate()


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_group_has_as_many_devices_as_its_mesh() -> None:
    for file in DEPLOY.glob("*-*pu.yaml"):
        group, *_ = yaml.safe_load_all(file.read_text())
        text = json.dumps(group)
        [mesh] = set(re.findall(r"--mesh (\S+)", text))
        size = (
            group["spec"].get("leaderWorkerTemplate", {}).get("size")
            or group["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
        )
        [chips] = set(re.findall(r'(?:nvidia.com/gpu|google.com/tpu)": (\d+)', text))
        sizes = [int(part.split("=")[1]) for part in mesh.split(",")]
        assert size * int(chips) == math.prod(sizes), file.name
        if processes := re.search(r"--num-processes (\d+)", text):
            assert int(processes[1]) == size


def test_hosted_checks_look_at_every_file_of_the_operators() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert any(step.get("run", "").startswith(".ci/run ") for step in jobs["checks"]["steps"])
    named = set(re.findall(r"deploy/\S+\.yaml", text))
    kinds = {str(file.relative_to(ROOT)) for file in DEPLOY.glob("*.yaml") if "apiVersion: " in file.read_text()}
    assert named == kinds


def test_an_image_has_an_extra_for_each_backend() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [backends] = re.findall(r"^ +([a-z0-9|]+)\) extra=\"", text, re.M)
    assert {"cuda", "tpu"} <= set(backends.split("|")) <= set(EXTRAS)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in source.split()), source
    images = {
        image for file in DEPLOY.rglob("*.yaml") for image in re.findall(r"image: \"?specserve:(\w+)", file.read_text())
    }
    assert images <= {"cpu", *backends.split("|")}
