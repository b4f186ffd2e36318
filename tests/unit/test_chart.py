"""The Helm chart, rendered without Helm: what Kubernetes would be given, for several values."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml

from masw.build.draft_plan import GIB, DraftPlan
from masw.engines.draft_io import DraftIO
from masw.engines.recipe import load_recipe, recipe_folder
from masw.plugins.slot_attention.rule import MemoryRule
from masw.triton_repo.metrics import Metrics
from tests.deployments import GPU_RECIPES
from tests.helm_subset import Chart
from tests.schema_subset import complaints

FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "masw"
CHART = Chart(FOLDER)
ON = {"monitoring": {"enabled": True}, "autoscaling": {"enabled": True}}
NODES = {"multiNode": {"enabled": True, "nodes": 3}}
OTHERS = {
    "image": {"pullSecrets": [{"name": "own"}]},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [],
    "ports": {"http": 9000, "grpc": 9001, "metrics": 9002},
    "disruptionBudget": {"enabled": False},
}
PRESETS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("recipes/*.yaml")}
CASES = {
    "defaults": (),
    "everything": (ON,),
    "several nodes": (ON, NODES),
    "one GPU": (PRESETS["llama-3.1-8b-3b"], ON),
    "eight GPUs": (PRESETS["llama-3.1-70b-tp8-3b"],),
    "no autoscaler": ({"monitoring": {"enabled": True}}, NODES),
    "others": (OTHERS,),
}
API = {
    "ConfigMap": "v1",
    "Deployment": "apps/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "Service": "v1",
}
SERVER_STOP_SECONDS = 30  # launch.sh's default


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """Values and documents by kind."""
    overrides = CASES[request.param]
    documents = CHART.render(*overrides)
    kinds = [document["kind"] for document in documents]
    assert len(set(kinds)) == len(kinds)
    by_kind = dict(zip(kinds, documents, strict=True))
    return SimpleNamespace(values=CHART.values(*overrides), **by_kind)


def templates(case) -> dict[str, dict]:
    """Pod templates by role."""
    if hasattr(case, "Deployment"):
        return {"server": case.Deployment["spec"]["template"]}
    group = case.LeaderWorkerSet["spec"]["leaderWorkerTemplate"]
    return {"server": group["leaderTemplate"], "worker": group["workerTemplate"]}


def container(case, role="server") -> dict:
    (only,) = templates(case)[role]["spec"]["containers"]
    return only


def test_the_kinds_follow_the_values(case):
    values = case.values
    wanted = {"ConfigMap", "Service"}
    wanted |= {"LeaderWorkerSet"} if values["multiNode"]["enabled"] else {"Deployment"}
    wanted |= {"PodMonitor"} if values["monitoring"]["enabled"] else set()
    wanted |= {"HorizontalPodAutoscaler"} if values["autoscaling"]["enabled"] else set()
    wanted |= {"PodDisruptionBudget"} if values["disruptionBudget"]["enabled"] else set()
    documents = {name: each for name, each in vars(case).items() if name != "values"}
    assert set(documents) == wanted
    assert all(each["apiVersion"] == API[kind] for kind, each in documents.items())
    assert all(each["metadata"]["name"].startswith("demo") for each in documents.values())
    assert all(
        each["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
        for each in documents.values()
    )


def test_selectors_choose_the_pods_that_answer_and_no_workers(case):
    selectors = [case.Service["spec"]["selector"]]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        if document := getattr(case, kind, None):
            selectors.append(document["spec"]["selector"]["matchLabels"])
    for role, template in templates(case).items():
        labels = template["metadata"]["labels"].items()
        assert all((each.items() <= labels) == (role == "server") for each in selectors)


def test_ports_are_those_of_the_server(case):
    ports = {each["name"]: each["containerPort"] for each in container(case)["ports"]}
    assert ports == case.values["ports"]
    for each in case.Service["spec"]["ports"]:
        assert ports[each["targetPort"]] == each["port"] and each["name"] == each["targetPort"]
    if monitor := getattr(case, "PodMonitor", None):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports and endpoint["path"] == "/metrics"
    environment = {each["name"]: each["value"] for each in container(case)["env"]}
    assert environment["MASW_HTTP_PORT"] == str(ports["http"])
    assert environment["MASW_METRICS_PORT"] == str(ports["metrics"])


def test_probes_ask_for_life_and_for_a_token(case):
    server, values = container(case), case.values
    for probe in ("startupProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    ready = server["readinessProbe"]
    script, seconds = ready["exec"]["command"]
    assert script == "/opt/masw/deploy/ready.sh" and int(seconds) + 4 < ready["timeoutSeconds"]
    startup = server["startupProbe"]
    patience = startup["periodSeconds"] * startup["failureThreshold"]
    assert patience > values["readySeconds"], "launch.sh names what is missing before the kubelet"


def test_pods_have_time_to_drain(case):
    for role, template in templates(case).items():
        (before,) = [container(case, role)["lifecycle"]["preStop"]["exec"]["command"]]
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace >= int(before[-1]) + SERVER_STOP_SECONDS, role
    assert container(case)["lifecycle"]["preStop"]["exec"]["command"][0].endswith("/drain.sh")


def test_what_is_mounted_exists(case):
    for role, template in templates(case).items():
        volumes = {each["name"] for each in template["spec"]["volumes"]}
        mounts = {each["name"] for each in container(case, role)["volumeMounts"]}
        assert volumes == mounts, role
    named = {each["name"]: each for each in templates(case)["server"]["spec"]["volumes"]}
    assert named["recipe"]["configMap"]["name"] == case.ConfigMap["metadata"]["name"]
    assert named["shm"]["emptyDir"]["medium"] == "Memory"
    paths = {each["name"]: each["mountPath"] for each in container(case)["volumeMounts"]}
    recipe, root = container(case)["args"][-2:]
    assert recipe == f"{paths['recipe']}/{next(iter(case.ConfigMap['data']))}"
    assert root == paths["root"] and paths["shm"] == "/dev/shm"


def test_another_recipe_starts_the_pods_anew(case):
    recipe = case.values["recipe"]
    annotations = templates(case)["server"]["metadata"]["annotations"]
    assert annotations["checksum/recipe"] == hashlib.sha256(recipe.encode()).hexdigest()


def test_pods_run_without_rights_they_do_not_need(case):
    for role, template in templates(case).items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        assert container(case, role)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_autoscaler_and_the_replicas_are_one_or_the_other(case):
    (workload,) = (getattr(case, k) for k in ("Deployment", "LeaderWorkerSet") if hasattr(case, k))
    scaler = getattr(case, "HorizontalPodAutoscaler", None)
    assert ("replicas" in workload["spec"]) == (scaler is None)
    if scaler:
        wanted = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": "demo"}
        assert scaler["spec"]["scaleTargetRef"] == wanted


def test_several_nodes_start_by_the_operator():
    group = CHART.render(NODES)[2]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 3 and group["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, worker = (
        group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate")
    )
    assert [each["args"][:2] for each in (leader, worker)] == [
        ["/opt/masw/deploy/node.sh", "leader"],
        ["/opt/masw/deploy/node.sh", "worker"],
    ]
    environment = {each["name"]: each["value"] for each in leader["env"]}
    paths = {each["name"]: each["mountPath"] for each in leader["volumeMounts"]}
    assert environment["MASW_SSH"] == paths["ssh"]
    assert environment["MASW_GPUS"] == str(leader["resources"]["limits"]["nvidia.com/gpu"])
    assert environment["MASW_SSH_PORT"] == str(worker["ports"][0]["containerPort"])


def test_the_autoscaler_reads_a_metric_that_exists():
    scaler = next(d for d in CHART.render(ON) if d["kind"] == "HorizontalPodAutoscaler")
    (wanted,) = scaler["spec"]["metrics"]
    rules = yaml.safe_load((FOLDER.parents[1] / "prometheus-adapter.yaml").read_text())["rules"]
    (rule,) = rules["custom"]
    assert rule["name"]["as"] == wanted["pods"]["metric"]["name"]
    triton = MagicMock()
    Metrics(triton, 4)
    families = {call.kwargs["name"] for call in triton.MetricFamily.call_args_list}
    series = set(re.findall(r"\bmasw_\w+", rule["seriesQuery"] + rule["metricsQuery"]))
    assert {re.sub("_(sum|count)$", "", name) for name in series} == {"masw_queue_seconds"}
    assert "masw_queue_seconds" in families


def weights(name: str, recipe) -> int:
    """Bytes of target and draft."""
    total = 0
    for config, rule in (
        (recipe.target_config(), MemoryRule(interval=0)),
        (recipe.draft_config(), recipe.memory),
    ):
        io = DraftIO.of(config, rule, max_sequences=1, max_length=1024, dtype="bfloat16")
        total += DraftPlan(config, io).weight_bytes
    return total


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_each_recipe_has_its_values(name):
    recipe, preset = load_recipe(name), PRESETS.get(name, {})
    values = CHART.values(preset)
    shipped = yaml.safe_load((recipe_folder() / f"{name}.yaml").read_text())
    (given,) = (d for d in CHART.render(preset) if d["kind"] == "ConfigMap")
    assert yaml.safe_load(given["data"]["recipe.yaml"]) == shipped
    assert values["gpus"] == recipe.target.ranks + (not recipe.shares_gpu)
    assert max(*recipe.target.gpus, recipe.draft.gpu) == values["gpus"] - 1
    serving, ports = recipe.serving, values["ports"]
    assert [ports[n] for n in ("http", "grpc", "metrics")] == [
        serving.http_port,
        serving.grpc_port,
        serving.metrics_port,
    ]
    memory = int(values["resources"]["memory"].removesuffix("Gi"))
    assert memory * GIB > weights(name, recipe) + 16 * GIB, "starting ranks read their weights"


SCHEMA = json.loads((FOLDER / "values.schema.json").read_text())


def test_the_schema_accepts_every_case(case):
    assert complaints(case.values, SCHEMA) == []


@pytest.mark.parametrize(
    "override, named",
    [
        ({"image": {"tag": "latest"}}, "values.image.tag"),
        ({"gpus": 0}, "values.gpus"),
        ({"gpus": "4"}, "values.gpus"),
        ({"gpu": 4}, "values.gpu "),
        ({"recipe": "name: x\nlane: cpu\n"}, "values.recipe"),
        ({"root": {"claim": "Not A Name"}}, "values.root.claim"),
        ({"sharedMemory": "8G"}, "values.sharedMemory"),
        ({"ports": {"http": 70000}}, "values.ports.http"),
        ({"multiNode": {"nodes": 1}}, "values.multiNode.nodes"),
        ({"autoscaling": {"queueSeconds": 2}}, "values.autoscaling.queueSeconds"),
        ({"autoscaling": {"maxReplicas": True}}, "values.autoscaling.maxReplicas"),
        ({"service": {"type": "ExternalName"}}, "values.service.type"),
        ({"tolerations": ["x"]}, "values.tolerations[0]"),
        ({"nodeSelector": {"a": 1}}, "values.nodeSelector.a"),
    ],
)
def test_the_schema_refuses_bad_values_by_name(override, named):
    (complaint,) = complaints(CHART.values(override), SCHEMA)
    assert f"{complaint} ".startswith(named)


def test_every_value_is_in_the_schema_and_used_by_a_template():
    text = "".join(path.read_text() for path in (FOLDER / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))

    def leaves(values, place=""):
        for name, each in values.items():
            whole = isinstance(each, dict) and each and f"{place}{name}" not in used
            yield from leaves(each, f"{place}{name}.") if whole else [f"{place}{name}"]

    assert set(leaves(CHART.defaults)) == used
    assert set(SCHEMA["properties"]) - {"global"} == set(CHART.defaults)
