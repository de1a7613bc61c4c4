"""The engines, started by real launchers, against a plain loop over the whole batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sopdist.config import ConfigError
from sopdist.data.errors import DataError
from sopdist.models import make_model
from sopdist.models.settings import ModelSettings
from sopdist.train.engine import Engine, with_common_statistics
from sopdist.train.optim import make_optimizer
from sopdist.train.settings import EngineSettings, OptimSettings
from sopdist.train.world import Place, World, open_world
from tests.train.engine_worker import compiled_graphs, network, samples, saved_optimizer, share, train
from tests.train.launching import launch

Result = dict[str, Any]
Start = Callable[..., dict[str, list[Result]]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run jobs on real ranks; what each rank saved, by the name of the job."""

    def run(launcher: str, kind: str, jobs: dict[str, dict[str, Any]], ranks: int = 2) -> dict[str, list[Result]]:
        folder = tmp_path_factory.mktemp("ranks")
        full = [{"kind": kind, "out": str(folder / name), **job} for name, job in jobs.items()]
        (folder / "jobs.json").write_text(json.dumps(full))
        ended = launch(launcher, "tests.train.engine_worker", [str(folder / "jobs.json")], ranks)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
        return {
            name: [torch.load(folder / f"{name}.rank{rank}", weights_only=True) for rank in range(ranks)]
            for name in jobs
        }

    return run


@pytest.fixture(scope="module")
def ddp(start: Start) -> dict[str, list[Result]]:
    return start(
        "torchrun",
        "ddp",
        {
            "plain": {},
            "pieces": {"pieces": 3},
            "clipped": {"clip": 0.5, "pieces": 2},
            "statistics": {"norm": True, "steps": 1, "rate": 0.0},
            "overflow": {"overflow": 1, "pieces": 2},
            "overflow clipped": {"overflow": 1, "clip": 0.5},
        },
    )


@pytest.fixture(scope="module")
def zero(start: Start) -> dict[str, list[Result]]:
    return start(
        "deepspeed",
        "deepspeed",
        {
            "0": {"clip": 0.5},
            "1": {"zero": 1, "clip": 0.5, "pieces": 3},
            "2": {"zero": 2, "clip": 0.5, "pieces": 3},
            "3": {"zero": 3, "clip": 0.5, "pieces": 3},
            "bf16": {"zero": 2, "precision": "bf16"},
            **{f"overflow {stage}": {"zero": stage, "overflow": 1} for stage in range(4)},
        },
    )


def oracle(
    steps: int = 3, clip: float = 0.0, optimizer: str = "sgd", zeroed: int = -1, left_out: int = -1
) -> tuple[dict[str, Tensor], list[float]]:
    """No engine, no ranks, no pieces: the mean loss over the samples with weight 1, and torch's optimizer.

    Step `zeroed` is made with a gradient of 0, step `left_out` not at all.
    """
    model = network()
    make = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=1e-2),
    }
    stepper, norms = make[optimizer](), []
    for step in range(steps):
        images, labels, weight = samples(step)
        kept = weight > 0
        stepper.zero_grad()
        nn.functional.cross_entropy(model(images[kept]), labels[kept]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        if step == zeroed:
            stepper.zero_grad(set_to_none=False)
        if step != left_out:
            stepper.step()
    return {name: value.detach() for name, value in model.named_parameters()}, norms


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("job", ["plain", "pieces"])
def test_two_uneven_ranks_of_ddp_in_one_or_three_pieces_train_as_one_process_on_the_whole_batch(
    ddp: dict[str, list[Result]], job: str
) -> None:
    for result in ddp[job]:
        assert_close(result["network"], oracle()[0])


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_every_zero_stage_trains_and_clips_as_one_process_on_the_whole_batch(
    zero: dict[str, list[Result]], stage: str
) -> None:
    weights, norms = oracle(clip=0.5)
    for result in zero[stage]:
        assert_close(result["network"], weights)
        assert result["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_without_a_launcher_trains_as_the_plain_loop(start: Start, stage: int) -> None:
    (result,) = start("python", "deepspeed", {"alone": {"zero": stage, "pieces": 2}}, ranks=1)["alone"]
    assert_close(result["network"], oracle()[0])


def test_ddp_clips_as_one_process_on_the_whole_batch(ddp: dict[str, list[Result]]) -> None:
    weights, norms = oracle(clip=0.5)
    for result in ddp["clipped"]:
        assert_close(result["network"], weights)
        assert result["norms"] == pytest.approx(norms, rel=1e-5)


def test_ddp_and_every_zero_stage_keep_the_same_optimizer_state(
    ddp: dict[str, list[Result]], zero: dict[str, list[Result]]
) -> None:
    wanted = ddp["clipped"][0]["optimizer"]
    assert set(wanted) == {f"{name}/momentum_buffer" for name, _ in network().named_parameters()}
    for stage in "0123":
        for result in zero[stage]:
            assert_close(result["optimizer"], wanted)


def assert_rounded(found: dict[str, Tensor], logits: Tensor) -> None:
    """Computed in bf16, but kept in float32: near the oracle, not at it."""
    weights = oracle()[0]
    assert logits.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in found.values())
    assert_close(found, weights, atol=0.02)
    assert any(not torch.allclose(found[name], weights[name], atol=1e-6) for name in weights)


def test_bf16_under_zero_rounds_but_keeps_weights_and_logits_in_float32(zero: dict[str, list[Result]]) -> None:
    for result in zero["bf16"]:
        assert_rounded(result["network"], result["logits"])


def test_bf16_in_one_process_rounds_but_keeps_weights_and_logits_in_float32() -> None:
    world = open_world(Place(), EngineSettings(precision="bf16", threads=1))
    engine = engine_of(world, network(), precision="bf16")
    train(engine, world, 0, 3, pieces=1, rate=0.1)
    assert_rounded(engine.network_state(), engine.forward(samples(99)[0]))
    with pytest.raises(ConfigError, match=r"engine\.precision = fp32, but the world was opened with bf16"):
        engine_of(world, network())
    world.close()


def test_averaged_statistics_are_the_mean_of_what_each_rank_saw(ddp: dict[str, list[Result]]) -> None:
    means = []
    for rank in range(2):
        model = network(norm=True)
        model(share(samples(0)[0], rank, 2))
        means.append(model[4].running_mean)
    for result in ddp["statistics"]:
        torch.testing.assert_close(result["network"]["4.running_mean"], (means[0] + means[1]) / 2)
        assert int(result["network"]["4.num_batches_tracked"]) == 1
    assert not torch.allclose(means[0], means[1])


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw"])
def test_a_state_wanders_bit_for_bit_through_engines_and_rank_counts_and_training_goes_on(
    start: Start, tmp_path: Path, optimizer: str
) -> None:
    def kept(result: Result, name: str) -> str:
        torch.save({"network": result["network"], "optimizer": result["optimizer"]}, tmp_path / name)
        return str(tmp_path / name)

    same = {"steps": 0, "optimizer": optimizer, "norm": True}
    on = {"first": 2, "steps": 2, "optimizer": optimizer, "rate": 0.01}
    rate = {"rate": 0.01}
    begun = start("torchrun", "ddp", {"a": {**same, "steps": 2, **rate}})["a"][0]
    state = kept(begun, "begun")
    two = start(
        "deepspeed", "deepspeed", {f"zero{stage}": {**same, "zero": stage, "load": state} for stage in range(4)}
    )
    three = start(
        "torchrun",
        "deepspeed",
        {f"three{stage}": {**same, "zero": stage, "load": kept(two["zero1"][1], "one")} for stage in (1, 3)},
        ranks=3,
    )
    back = start("python", "single", {"single": {**same, "load": kept(three["three3"][2], "three")}}, ranks=1)
    for job, results in {**two, **three, **back}.items():
        for result in results:
            for part in ("network", "optimizer"):
                assert result[part].keys() == begun[part].keys(), job
                for name, value in begun[part].items():
                    assert torch.equal(result[part][name], value), (job, name)

    plain = {"optimizer": optimizer, **rate}
    half = kept(start("torchrun", "ddp", {"half": {**plain, "steps": 2}})["half"][0], "half")
    goes_on = start("deepspeed", "deepspeed", {f"on{n}": {**on, "zero": n, "load": half} for n in (1, 2, 3)})
    whole = start("python", "single", {"whole": {**plain, "steps": 4}}, ranks=1)["whole"][0]
    for results in goes_on.values():
        for result in results:
            assert_close(result["network"], whole["network"], atol=2e-5)


@pytest.fixture
def alone() -> Iterator[World]:
    world = open_world(Place(), EngineSettings(threads=1))
    yield world
    world.close()


def engine_of(world: World, model: nn.Module, **settings: Any) -> Engine:
    optimizer = make_optimizer(OptimSettings(lr=0.1, weight_decay=1e-2), model)
    return Engine(world, EngineSettings(**settings), model, optimizer, accumulate=1, clip=0.0, batch=12)


def test_one_process_trains_as_the_plain_loop(alone: World) -> None:
    engine = engine_of(alone, network())
    weights, norms = oracle()
    assert train(engine, alone, 0, 3, pieces=3, rate=0.1) == pytest.approx(norms, rel=1e-5)
    assert_close(engine.network_state(), weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sample_that_overflows_in_one_process_does_not_reach_the_weights(precision: Any) -> None:
    """Not even as 0 * inf: the step's gradient counts as 0, and training goes on."""
    world = open_world(Place(), EngineSettings(precision=precision, threads=1))
    engine = engine_of(world, network(), precision=precision)
    norms = train(engine, world, 0, 3, pieces=2, rate=0.1, overflow=1)
    assert [math.isfinite(norm or 0.0) for norm in norms] == [True, False, True]
    assert_close(engine.network_state(), oracle(zeroed=1)[0], atol=1e-6 if precision == "fp32" else 0.02)
    world.close()


def test_a_sample_that_overflows_on_one_rank_of_ddp_does_not_reach_the_weights_of_any(
    ddp: dict[str, list[Result]],
) -> None:
    for job, clip in (("overflow", 0.0), ("overflow clipped", 0.5)):
        for result in ddp[job]:
            assert_close(result["network"], oracle(clip=clip, zeroed=1)[0])


@pytest.mark.parametrize("stage", range(4))
def test_a_sample_that_overflows_does_not_reach_the_weights_of_any_zero_stage(
    zero: dict[str, list[Result]], stage: int
) -> None:
    """From stage 1 on DeepSpeed leaves the whole step out, momentum and decay too."""
    wanted = oracle(left_out=1)[0] if stage else oracle(zeroed=1)[0]
    for result in zero[f"overflow {stage}"]:
        assert_close(result["network"], wanted)


def test_a_state_taken_is_a_copy_and_loading_it_undoes_what_came_after(alone: World, tmp_path: Path) -> None:
    engine = engine_of(alone, network(norm=True))
    train(engine, alone, 0, 2, pieces=1, rate=0.1)
    weights, momenta = engine.network_state(), saved_optimizer(engine, tmp_path / "saved")
    train(engine, alone, 2, 1, pieces=1, rate=0.1)
    later = engine.network_state()
    engine.load_network_state(weights)
    engine.load_optimizer_state(momenta)
    assert all(torch.equal(value, weights[name]) for name, value in engine.network_state().items())
    train(engine, alone, 2, 1, pieces=1, rate=0.1)
    assert all(torch.equal(value, later[name]) for name, value in engine.network_state().items())
    assert all(value.is_contiguous() and value.device.type == "cpu" for value in {**weights, **momenta}.values())


def test_a_state_of_another_network_is_refused_by_name(alone: World) -> None:
    engine = engine_of(alone, network())
    state = engine.network_state()
    with pytest.raises(DataError, match=r"5\.bias is \(7,\), the network has \(5,\)"):
        engine.load_network_state({**state, "5.bias": torch.zeros(7)})
    with pytest.raises(DataError, match=r"head\.bias is in the state but not in the network"):
        engine.load_network_state({**state, "head.bias": torch.zeros(5)})
    del state["0.weight"]
    with pytest.raises(DataError, match=r"0\.weight is in the network but not in the state"):
        engine.load_network_state(state)
    with pytest.raises(DataError, match=r"5\.bias/momentum_buffer is \(7,\)"):
        engine.load_optimizer_state({"5.bias/momentum_buffer": torch.zeros(7)})
    with pytest.raises(DataError, match=r"Adam's count of steps \(step\), but not its moments"):
        engine.load_optimizer_state({f"{name}/step": torch.tensor(3.0) for name, _ in network().named_parameters()})


@pytest.mark.parametrize(
    ("name", "size"), [("resnet34", 32), ("mobilenetv3_small_050", 64), ("inception_resnet_v2", 96)]
)
def test_statistics_over_all_ranks_leave_a_network_its_activations_and_its_parameters(name: str, size: int) -> None:
    """timm's networks have norms with an activation inside, which torch's own conversion drops."""
    torch.manual_seed(0)
    before = make_model(ModelSettings(name), channels=3, size=size, classes=10).eval()
    images = torch.randn(1, 3, size, size)
    parameters = dict(before.named_parameters())
    with torch.no_grad():
        wanted = before(images)
        after = with_common_statistics(before)
        torch.testing.assert_close(after(images), wanted, rtol=0, atol=0)
    assert any(isinstance(module, nn.SyncBatchNorm) for module in after.modules())
    assert parameters.keys() == dict(after.named_parameters()).keys()
    assert all(parameters[key] is value for key, value in after.named_parameters())


def test_statistics_that_a_sample_has_spoiled_are_repaired(alone: World) -> None:
    engine = engine_of(alone, network(norm=True))
    images = samples(0)[0]
    engine.forward(images)
    engine.average_statistics()
    sound = engine.network_state()
    spoiled = images.clone()
    spoiled[0] = math.inf
    engine.forward(spoiled)
    broken = engine.network_state()["4.running_mean"]
    assert not torch.isfinite(broken).all()
    engine.repair_statistics()
    for name in ("4.running_mean", "4.running_var"):
        assert torch.isfinite(engine.network_state()[name]).all()
    assert torch.equal(engine.network_state()["4.running_mean"][~torch.isfinite(broken)],
                       sound["4.running_mean"][~torch.isfinite(broken)])  # fmt: skip


def test_what_a_cpu_cannot_do_is_refused_by_key(alone: World) -> None:
    with pytest.raises(ConfigError, match=r"engine\.sync_batchnorm: needs GPUs"):
        engine_of(alone, network(norm=True), sync_batchnorm=True)
    with pytest.raises(ConfigError, match=r"engine\.precision = fp16: needs a GPU"):
        open_world(Place(), EngineSettings(precision="fp16"))


@pytest.mark.long
def test_a_compiled_network_keeps_its_names_and_its_results(alone: World) -> None:
    engine = engine_of(alone, network(), compile=True)
    before = compiled_graphs()
    train(engine, alone, 0, 2, pieces=1, rate=0.1)
    assert compiled_graphs() > before
    assert_close(engine.network_state(), oracle(steps=2)[0], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "kind"), [("torchrun", "ddp"), ("deepspeed", "deepspeed")])
def test_two_ranks_of_ddp_and_of_zero_0_train_a_compiled_network_as_one_that_is_not(
    start: Start, launcher: str, kind: str
) -> None:
    for result in start(launcher, kind, {"compiled": {"compile": True, "clip": 0.5}})["compiled"]:
        assert result["graphs"] > 0
        assert_close(result["network"], oracle(clip=0.5)[0], atol=1e-5)
