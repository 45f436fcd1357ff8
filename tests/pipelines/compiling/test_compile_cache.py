"""The folder of compiled code: one for a node and a kind of CPU, without what a killed worker has left in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import SkipFrame, TensorifyScalarRestartAnalysis
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tridentserve.pipelines import compile_cache, kernels
from tridentserve.pipelines.compile_cache import open_compile_cache, remove_damaged

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Some shared library that is whole.
LIBRARY = next(path for path in map(Path, (torch._C.__file__, sys.executable)) if path.is_file())


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, default_cache_dir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_compile_cache(tmp_path / "cache" / "compiled")
    return Path(os.environ[VARIABLE])


def write_library(path: Path, content: bytes, age_s: float = 60.0) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    written_s = path.stat().st_mtime - age_s
    os.utime(path, (written_s, written_s))
    return path


def test_workers_of_a_node_share_a_folder_that_is_their_user_s_own(folder: Path, tmp_path: Path) -> None:
    assert folder.parent == tmp_path / "cache" / "compiled"
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]
    os.environ[VARIABLE] = default_cache_dir()
    open_compile_cache(folder.parent)
    assert os.environ[VARIABLE] == str(folder)


def test_another_kind_of_cpu_has_a_folder_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx512f\n")
    monkeypatch.setattr(compile_cache, "_CPU_INFO", tmp_path / "cpuinfo")
    os.environ[VARIABLE] = default_cache_dir()
    open_compile_cache(folder.parent)
    assert Path(os.environ[VARIABLE]).parent == folder.parent
    assert Path(os.environ[VARIABLE]) != folder


def test_a_folder_that_somebody_has_named_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own"))
    open_compile_cache(tmp_path / "compiled")
    assert os.environ[VARIABLE] == str(tmp_path / "own")
    assert not (tmp_path / "compiled").exists()


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled").chmod(0o777)
    open_compile_cache(tmp_path / "compiled")
    assert os.environ[VARIABLE] == default_cache_dir()
    assert "is not this user's own" in caplog.text


def test_libraries_that_were_not_written_to_their_end_are_removed(folder: Path) -> None:
    (folder / "ab").mkdir()
    whole = folder / "ab" / "whole.so"
    shutil.copy(LIBRARY, whole)
    os.utime(whole, (0, 0))
    content = LIBRARY.read_bytes()
    zeros = write_library(folder / "ab" / "zeros.main.so", bytes(5000))
    short = write_library(folder / "cd" / "short.so", content[: len(content) // 2])
    empty = write_library(folder / "cd" / "empty.so", b"")
    fresh = write_library(folder / "cd" / "fresh.so", b"", age_s=0.0)
    assert remove_damaged() == 3
    assert [path.exists() for path in (whole, zeros, short, empty, fresh)] == [True, False, False, False, True]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the compiler does, call after call: an error is raised."""
    outcomes: list[Any] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: compile_graph)
    kernels._make_backend.cache_clear()
    yield outcomes
    kernels._make_backend.cache_clear()


def make_graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(lambda x: 2 * x)


def run(compiled: Callable[..., Any]) -> float:
    return float(compiled(torch.tensor(3.0)))


def test_a_model_whose_compilation_fails_computes_without_it(
    folder: Path, compiler: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    compiler += [ImportError("x.so: invalid ELF header\nmore"), lambda x: 100 * x]
    compile_graph = kernels._make_backend("sdpa")
    assert run(compile_graph(make_graph(), [])) == 6.0
    assert (
        "torch.compile fails here, the model computes without it: ImportError: x.so: invalid ELF header" in caplog.text
    )
    assert run(compile_graph(make_graph(), [])) == 300.0


@pytest.mark.parametrize("again", [ImportError("still"), lambda x: 100 * x])
def test_compilation_is_tried_again_without_what_was_damaged(folder: Path, compiler: list[Any], again: Any) -> None:
    write_library(folder / "ab" / "zeros.main.so", bytes(5000))
    compiler += [ImportError("zeros.main.so: invalid ELF header"), again]
    assert run(kernels._make_backend("sdpa")(make_graph(), [])) == (6.0 if isinstance(again, Exception) else 300.0)
    assert not compiler


@pytest.mark.parametrize("request_of_torch", [TensorifyScalarRestartAnalysis(), SkipFrame("run it as it is")])
@pytest.mark.parametrize("failures", [0, 1])
def test_torch_s_own_requests_reach_torch(
    folder: Path, compiler: list[Any], caplog: pytest.LogCaptureFixture, request_of_torch: Exception, failures: int
) -> None:
    """It raises them from compilers that do not fail, such as to trace the code again; also at the second try."""
    write_library(folder / "ab" / "zeros.main.so", bytes(5000))
    compiler += [*[ImportError("zeros.main.so: invalid ELF header")] * failures, request_of_torch]
    with pytest.raises(type(request_of_torch)):
        kernels._make_backend("sdpa")(make_graph(), [])
    assert not compiler
    assert "torch.compile fails here" not in caplog.text


class Limit(torch.nn.Module):
    def forward(self, values: torch.Tensor, limit: float) -> torch.Tensor:
        return 2 * values.clamp(max=limit)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("default::DeprecationWarning")  # modules that Inductor imports have them
def test_code_with_a_number_that_changes_is_compiled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The compiler itself, which asks for another trace there."""
    kernels._make_backend.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    forward, values = kernels._compile_forward(Limit().forward, "sdpa"), torch.linspace(-1, 1, 32)
    difference = (forward(values, 0.5) - Limit()(values, 0.5)).abs().max()
    assert float(difference) <= 1e-4
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 1
    assert stats["calls_captured"] > 3, "traced once only: this number has not made the compiler ask for more"
    assert "torch.compile fails here" not in caplog.text
