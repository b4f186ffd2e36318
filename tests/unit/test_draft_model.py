"""The shell of `masw_draft`: its draft goes to the device of the model's instance group."""

import importlib.util
import json
import sys
from types import ModuleType

import pytest
import torch

from masw.build.repository import DRAFT, RepositoryConfig, model_configs
from masw.build.trtllm_config import BackendTarget
from masw.engines.recipe import recipe_folder

SHELL = recipe_folder().parents[1] / "triton_repo" / "masw_draft" / "1" / "model.py"


@pytest.fixture
def shell(monkeypatch):
    """The module of the model, outside of a server; what it loads and which device it chose."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("pb_utils"))
    spec = importlib.util.spec_from_file_location("masw_draft_model", SHELL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", module.chosen.append)
    monkeypatch.setattr(module, "load_draft", lambda *given, **options: (given, options))
    return module


def initialized(shell, folder, config, kind, device):
    message = model_configs(config)[DRAFT]
    parameters = {k: {"string_value": v.string_value} for k, v in message.parameters.items()}
    (folder / DRAFT).mkdir(exist_ok=True)
    model = shell.TritonPythonModel()
    model.initialize(
        {
            "model_config": json.dumps({"parameters": parameters}),
            "model_repository": str(folder / DRAFT),
            "model_instance_kind": kind,
            "model_instance_device_id": device,
        }
    )
    return model.draft


def test_on_a_gpu_the_draft_runs_on_the_instances_device(shell, tmp_path):
    target = BackendTarget("/engines/target", (0, 1))
    config = RepositoryConfig(str(tmp_path), max_sequences=3, draft_gpu=2, target=target)
    (folder, mode, sequences), options = initialized(shell, tmp_path, config, "GPU", "2")
    assert (folder, mode, sequences) == (tmp_path, "slots", 3)
    assert options == {"device": torch.device("cuda", 2)}
    assert shell.chosen == [torch.device("cuda", 2)]
    assert not list(tmp_path.glob(".cores"))  # a repository may be read-only there


def test_on_the_cpu_no_device_is_chosen(shell, tmp_path):
    config = RepositoryConfig(str(tmp_path))
    _, options = initialized(shell, tmp_path, config, "CPU", "0")
    assert options == {"device": "cpu"} and shell.chosen == []
    assert (tmp_path / ".cores").is_file()
