"""The engines, started by real launchers, compared with a plain loop over the full batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sopdist.errors import ConfigError, DataError
from sopdist.models import make_model
from sopdist.models.settings import ModelSettings
from sopdist.train.distributed.world import LaunchEnv, World, open_world
from sopdist.train.engine import Engine, make_engine
from sopdist.train.engine.base import with_synced_statistics
from sopdist.train.optim import make_optimizer
from sopdist.train.settings import EngineSettings, OptimSettings
from tests.support.engine_worker import compiled_graphs, network, samples, saved_optimizer, share, train
from tests.support.launching import launch

Result = dict[str, Any]
Start = Callable[..., dict[str, list[Result]]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run jobs on real ranks; returns the results of each rank by the name of the job."""

    def run(launcher: str, kind: str, jobs: dict[str, dict[str, Any]], ranks: int = 2) -> dict[str, list[Result]]:
        folder = tmp_path_factory.mktemp("ranks")
        full = [{"kind": kind, "out": str(folder / name), **job} for name, job in jobs.items()]
        (folder / "jobs.json").write_text(json.dumps(full))
        process = launch(launcher, "tests.support.engine_worker", [str(folder / "jobs.json")], ranks)
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
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
            "micro-batches": {"micro_batches": 3},
            "clipped": {"clip": 0.5, "micro_batches": 2},
            "statistics": {"norm": True, "steps": 1, "lr": 0.0},
            "overflow": {"overflow": 1, "micro_batches": 2},
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
            "1": {"zero": 1, "clip": 0.5, "micro_batches": 3},
            "2": {"zero": 2, "clip": 0.5, "micro_batches": 3},
            "3": {"zero": 3, "clip": 0.5, "micro_batches": 3},
            "bf16": {"zero": 2, "precision": "bf16"},
            **{f"overflow {stage}": {"zero": stage, "overflow": 1} for stage in range(4)},
        },
    )


def oracle(
    steps: int = 3, clip: float = 0.0, optimizer: str = "sgd", zeroed: int = -1, skipped: int = -1
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on the mean loss of the samples with weight 1, without engine, ranks or micro-batches.

    Step `zeroed` has a gradient of 0, step `skipped` is not taken. Returns the weights and the gradient norms.
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
        if step != skipped:
            stepper.step()
    return {name: value.detach() for name, value in model.named_parameters()}, norms


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("job", ["plain", "micro-batches"])
def test_ddp_on_two_uneven_ranks_with_one_or_three_micro_batches_trains_like_the_plain_loop(
    ddp: dict[str, list[Result]], job: str
) -> None:
    for result in ddp[job]:
        assert_close(result["network"], oracle()[0])


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_every_zero_stage_trains_and_clips_like_the_plain_loop(zero: dict[str, list[Result]], stage: str) -> None:
    weights, norms = oracle(clip=0.5)
    for result in zero[stage]:
        assert_close(result["network"], weights)
        assert result["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_without_a_launcher_trains_like_the_plain_loop(start: Start, stage: int) -> None:
    (result,) = start("python", "deepspeed", {"one": {"zero": stage, "micro_batches": 2}}, ranks=1)["one"]
    assert_close(result["network"], oracle()[0])


def test_ddp_clips_like_the_plain_loop(ddp: dict[str, list[Result]]) -> None:
    weights, norms = oracle(clip=0.5)
    for result in ddp["clipped"]:
        assert_close(result["network"], weights)
        assert result["norms"] == pytest.approx(norms, rel=1e-5)


def test_ddp_and_every_zero_stage_have_the_same_optimizer_state(
    ddp: dict[str, list[Result]], zero: dict[str, list[Result]]
) -> None:
    wanted = ddp["clipped"][0]["optimizer"]
    assert set(wanted) == {f"{name}/momentum_buffer" for name, _ in network().named_parameters()}
    for stage in "0123":
        for result in zero[stage]:
            assert_close(result["optimizer"], wanted)


def assert_rounded(found: dict[str, Tensor], logits: Tensor) -> None:
    """Computed in bf16 but stored in float32: close to the oracle, not equal to it."""
    weights = oracle()[0]
    assert logits.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in found.values())
    assert_close(found, weights, atol=0.02)
    assert any(not torch.allclose(found[name], weights[name], atol=1e-6) for name in weights)


def test_bf16_under_zero_rounds_but_weights_and_logits_are_float32(zero: dict[str, list[Result]]) -> None:
    for result in zero["bf16"]:
        assert_rounded(result["network"], result["logits"])


def test_bf16_in_one_process_rounds_but_weights_and_logits_are_float32() -> None:
    world = open_world(LaunchEnv(), EngineSettings(precision="bf16", threads=1))
    engine = engine_for(world, network(), precision="bf16")
    train(engine, world, 0, 3, micro_batches=1, lr=0.1)
    assert_rounded(engine.network_state(), engine.forward(samples(99)[0]))
    with pytest.raises(ConfigError, match=r"engine\.precision = fp32, but the world was opened with bf16"):
        engine_for(world, network())
    world.close()


def test_averaged_statistics_are_the_mean_over_ranks(ddp: dict[str, list[Result]]) -> None:
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
def test_state_loads_bit_for_bit_into_every_engine_and_rank_count_and_training_continues(
    start: Start, tmp_path: Path, optimizer: str
) -> None:
    def save(result: Result, name: str) -> str:
        torch.save({"network": result["network"], "optimizer": result["optimizer"]}, tmp_path / name)
        return str(tmp_path / name)

    same = {"steps": 0, "optimizer": optimizer, "norm": True}
    more = {"first": 2, "steps": 2, "optimizer": optimizer, "lr": 0.01}
    saved = start("torchrun", "ddp", {"a": {**same, "steps": 2, "lr": 0.01}})["a"][0]
    state = save(saved, "saved")
    two = start(
        "deepspeed", "deepspeed", {f"zero{stage}": {**same, "zero": stage, "load": state} for stage in range(4)}
    )
    three = start(
        "torchrun",
        "deepspeed",
        {f"three{stage}": {**same, "zero": stage, "load": save(two["zero1"][1], "one")} for stage in (1, 3)},
        ranks=3,
    )
    back = start("python", "single", {"single": {**same, "load": save(three["three3"][2], "three")}}, ranks=1)
    for job, results in {**two, **three, **back}.items():
        for result in results:
            for part in ("network", "optimizer"):
                assert result[part].keys() == saved[part].keys(), job
                for name, value in saved[part].items():
                    assert torch.equal(result[part][name], value), (job, name)

    plain = {"optimizer": optimizer, "lr": 0.01}
    half = save(start("torchrun", "ddp", {"half": {**plain, "steps": 2}})["half"][0], "half")
    resumed = start("deepspeed", "deepspeed", {f"more{n}": {**more, "zero": n, "load": half} for n in (1, 2, 3)})
    full = start("python", "single", {"full": {**plain, "steps": 4}}, ranks=1)["full"][0]
    for results in resumed.values():
        for result in results:
            assert_close(result["network"], full["network"], atol=2e-5)


@pytest.fixture
def one_rank() -> Iterator[World]:
    world = open_world(LaunchEnv(), EngineSettings(threads=1))
    yield world
    world.close()


def engine_for(world: World, model: nn.Module, **settings: Any) -> Engine:
    optimizer = make_optimizer(OptimSettings(lr=0.1, weight_decay=1e-2), model)
    return make_engine(world, EngineSettings(**settings), model, optimizer, accumulate=1, clip=0.0, batch=12)


def test_one_process_trains_like_the_plain_loop(one_rank: World) -> None:
    engine = engine_for(one_rank, network())
    weights, norms = oracle()
    assert train(engine, one_rank, 0, 3, micro_batches=3, lr=0.1) == pytest.approx(norms, rel=1e-5)
    assert_close(engine.network_state(), weights)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.channels_last: list[bool] = []

    def forward(self, images: Tensor, weights: Tensor) -> Tensor:
        self.channels_last = [
            images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous(),
            weights.is_contiguous(),
        ]
        return (images * self.scale).double() + weights[:, :, None, None]


@pytest.mark.parametrize("channels_last", [True, False])
def test_forward_passes_all_inputs_and_only_images_in_channels_last(one_rank: World, channels_last: bool) -> None:
    model = TwoInputs()
    engine = engine_for(one_rank, model, channels_last=channels_last)
    images, weights = torch.randn(2, 3, 4, 4), torch.randn(2, 3)
    output = engine.forward(images, weights)
    assert model.channels_last == [channels_last, True]
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, images * 2 + weights[:, :, None, None])


def test_replicated_state_and_statistics_are_the_full_state_of_one_process(one_rank: World) -> None:
    engine = engine_for(one_rank, network(norm=True))
    train(engine, one_rank, 0, 1, micro_batches=1, lr=0.1)
    state = engine.network_state()
    assert engine.statistics().keys() == {"4.running_mean", "4.running_var"}
    assert engine.replicated_network().keys() == state.keys() - engine.statistics().keys()
    for name, value in {**engine.replicated_network(), **engine.statistics()}.items():
        assert torch.equal(value, state[name])
    assert engine.replicated_optimizer().keys() == {
        f"{name}/momentum_buffer" for name, _ in engine.network.named_parameters()
    }
    assert engine.own_fragments() == ({}, {})
    assert torch.equal(engine.last_finite_statistics()["4.running_mean"], torch.zeros(257))
    engine.average_statistics()
    assert torch.equal(engine.last_finite_statistics()["4.running_mean"], state["4.running_mean"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_overflowing_sample_in_one_process_does_not_reach_the_weights(precision: Any) -> None:
    """Not even as 0 * inf: the gradient of that step is set to 0, and training continues."""
    world = open_world(LaunchEnv(), EngineSettings(precision=precision, threads=1))
    engine = engine_for(world, network(), precision=precision)
    norms = train(engine, world, 0, 3, micro_batches=2, lr=0.1, overflow=1)
    assert [math.isfinite(norm or 0.0) for norm in norms] == [True, False, True]
    assert_close(engine.network_state(), oracle(zeroed=1)[0], atol=1e-6 if precision == "fp32" else 0.02)
    world.close()


def test_an_overflowing_sample_on_one_rank_of_ddp_does_not_reach_the_weights_of_any_rank(
    ddp: dict[str, list[Result]],
) -> None:
    for job, clip in (("overflow", 0.0), ("overflow clipped", 0.5)):
        for result in ddp[job]:
            assert_close(result["network"], oracle(clip=clip, zeroed=1)[0])


@pytest.mark.parametrize("stage", range(4))
def test_an_overflowing_sample_does_not_reach_the_weights_under_any_zero_stage(
    zero: dict[str, list[Result]], stage: int
) -> None:
    """From stage 1 on DeepSpeed skips the entire step, including momentum and weight decay."""
    wanted = oracle(skipped=1)[0] if stage else oracle(zeroed=1)[0]
    for result in zero[f"overflow {stage}"]:
        assert_close(result["network"], wanted)


def test_a_saved_state_is_a_copy_and_loading_it_undoes_later_steps(one_rank: World, tmp_path: Path) -> None:
    engine = engine_for(one_rank, network(norm=True))
    train(engine, one_rank, 0, 2, micro_batches=1, lr=0.1)
    weights, momenta = engine.network_state(), saved_optimizer(engine, tmp_path / "saved")
    train(engine, one_rank, 2, 1, micro_batches=1, lr=0.1)
    later = engine.network_state()
    engine.load_network_state(weights)
    engine.load_optimizer_state(momenta)
    assert all(torch.equal(value, weights[name]) for name, value in engine.network_state().items())
    train(engine, one_rank, 2, 1, micro_batches=1, lr=0.1)
    assert all(torch.equal(value, later[name]) for name, value in engine.network_state().items())
    assert all(value.is_contiguous() and value.device.type == "cpu" for value in {**weights, **momenta}.values())


def test_the_state_of_another_network_is_rejected_by_name(one_rank: World) -> None:
    engine = engine_for(one_rank, network())
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
    with pytest.raises(DataError, match=r"Adam's step count \(step\), but not its moments"):
        engine.load_optimizer_state({f"{name}/step": torch.tensor(3.0) for name, _ in network().named_parameters()})


@pytest.mark.parametrize(
    ("name", "size"), [("resnet34", 32), ("mobilenetv3_small_050", 64), ("inception_resnet_v2", 96)]
)
def test_synced_batch_norm_keeps_activations_and_parameters(name: str, size: int) -> None:
    """timm's networks have norm layers that include an activation, which torch's own conversion drops."""
    torch.manual_seed(0)
    before = make_model(ModelSettings(name), channels=3, size=size, classes=10).eval()
    images = torch.randn(1, 3, size, size)
    parameters = dict(before.named_parameters())
    with torch.no_grad():
        wanted = before(images)
        after = with_synced_statistics(before)
        torch.testing.assert_close(after(images), wanted, rtol=0, atol=0)
    assert any(isinstance(module, nn.SyncBatchNorm) for module in after.modules())
    assert parameters.keys() == dict(after.named_parameters()).keys()
    assert all(parameters[key] is value for key, value in after.named_parameters())


def test_statistics_that_a_bad_sample_made_nonfinite_are_repaired(one_rank: World) -> None:
    engine = engine_for(one_rank, network(norm=True))
    images = samples(0)[0]
    engine.forward(images)
    engine.average_statistics()
    averaged = engine.network_state()
    bad_images = images.clone()
    bad_images[0] = math.inf
    engine.forward(bad_images)
    broken = engine.network_state()["4.running_mean"]
    assert not torch.isfinite(broken).all()
    engine.repair_statistics()
    for name in ("4.running_mean", "4.running_var"):
        assert torch.isfinite(engine.network_state()[name]).all()
    assert torch.equal(engine.network_state()["4.running_mean"][~torch.isfinite(broken)],
                       averaged["4.running_mean"][~torch.isfinite(broken)])  # fmt: skip


def test_settings_that_need_a_gpu_are_rejected_by_key(one_rank: World) -> None:
    with pytest.raises(ConfigError, match=r"engine\.sync_batchnorm: needs GPUs"):
        engine_for(one_rank, network(norm=True), sync_batchnorm=True)
    with pytest.raises(ConfigError, match=r"engine\.precision = fp16: needs a GPU"):
        open_world(LaunchEnv(), EngineSettings(precision="fp16"))


@pytest.mark.long
def test_a_compiled_network_keeps_its_names_and_its_results(one_rank: World) -> None:
    engine = engine_for(one_rank, network(), compile=True)
    before = compiled_graphs()
    train(engine, one_rank, 0, 2, micro_batches=1, lr=0.1)
    assert compiled_graphs() > before
    assert_close(engine.network_state(), oracle(steps=2)[0], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "kind"), [("torchrun", "ddp"), ("deepspeed", "deepspeed")])
def test_ddp_and_zero_0_on_two_ranks_train_a_compiled_network_like_the_plain_loop(
    start: Start, launcher: str, kind: str
) -> None:
    for result in start(launcher, kind, {"compiled": {"compile": True, "clip": 0.5}})["compiled"]:
        assert result["graphs"] > 0
        assert_close(result["network"], oracle(clip=0.5)[0], atol=1e-5)
