"""torchrl's released GAE, ClipPPOLoss and GRPOLoss, against the adapters and PPOLossConfig.torchrl()."""

from __future__ import annotations

import pytest
import torch
from draws import FP32, NAN, close, mask
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import MaskedCategorical, OneHotCategorical, ProbabilisticActor
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import GRPOLoss
from torchrl.objectives.llm.grpo import DAPO, CISPOLoss
from torchrl.objectives.value import GAE, MultiAgentGAE, functional

from ppo_kernels import PPOLossConfig, fused_ppo_loss, masked_whiten, ppo_loss
from ppo_kernels.integrations import torchrl
from ppo_kernels.integrations.torchrl_loss import FusedClipPPOLoss
from ppo_kernels.presets import WHITEN_OPTIONS

LOOP, VECTORISED = functional.generalized_advantage_estimate, functional.vec_generalized_advantage_estimate
THEIRS = pytest.mark.parametrize("theirs", [LOOP, VECTORISED], ids=["loop", "vectorised"])
OURS = torchrl.generalized_advantage_estimate


# -- GAE -------------------------------------------------------------------------------------------------------------


def trajectories(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    done = torch.rand(shape) < 0.15
    floating = {name: torch.randn(shape, dtype=dtype) for name in ("state_value", "next_state_value", "reward")}
    return {**floating, "done": done, "terminated": done & (torch.rand(shape) < 0.5)}


def expected_gae(gamma: float, lmbda: float, x: dict[str, Tensor], time_dim: int = -2) -> tuple[Tensor, Tensor]:
    """Written out, in float64: delta without what follows a termination, the trace cut at every end."""
    x = {name: t.movedim(time_dim, 0).double() for name, t in x.items()}
    carry, found = torch.zeros_like(x["reward"][0]), []
    for t in reversed(range(len(x["reward"]))):
        following = torch.where(x["terminated"][t] != 0, 0.0, x["next_state_value"][t])
        delta = x["reward"][t] + gamma * following - x["state_value"][t]
        carry = delta + gamma * lmbda * (1 - x["done"][t]) * carry
        found.insert(0, carry)
    advantage = torch.stack(found)
    return advantage.movedim(0, time_dim), (advantage + x["state_value"]).movedim(0, time_dim)


SHAPES = [((3, 40, 1), -2), ((2, 3, 40, 2), -2), ((40,), -1), ((40, 3, 1), 0), ((2, 40, 3, 2), 1)]


@THEIRS
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES)
def test_gae_in_float64(theirs, shape, time_dim):
    x, exact = trajectories(shape), {"dtype": torch.float64}
    want = theirs(torch.tensor(0.99, **exact), torch.tensor(0.95, **exact), **x, time_dim=time_dim)
    for got in (OURS(0.99, 0.95, **x, time_dim=time_dim), expected_gae(0.99, 0.95, x, time_dim)):
        for g, w in zip(got, want, strict=True):
            assert g.dtype == torch.float64
            close(g, w, 1e-12)


@THEIRS
@pytest.mark.parametrize(("gamma", "lmbda"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.5), (1.0, 0.95), (0.5, 1.0)])
def test_gae_in_float32(theirs, gamma, lmbda):
    x = trajectories((4, 200, 1), torch.float32)
    exact = expected_gae(gamma, lmbda, x)
    for got, want, right in zip(OURS(gamma, lmbda, **x), theirs(gamma, lmbda, **x), exact, strict=True):
        assert got.dtype == want.dtype == torch.float32
        close(got, want)
        close(got, right, 2e-6)


@THEIRS
def test_gae_without_terminated_takes_done(theirs):
    x = trajectories((2, 30, 1), torch.float32)
    del x["terminated"]
    for got, want in zip(OURS(0.99, 0.95, **x), theirs(0.99, 0.95, **x), strict=True):
        close(got, want)


def test_gae_terminated_without_done_drops_the_next_value_and_keeps_the_trace():
    x = trajectories((2, 30, 1))
    x["terminated"] = torch.rand(2, 30, 1) < 0.3
    exact = {"dtype": torch.float64}
    want = LOOP(torch.tensor(0.99, **exact), torch.tensor(0.95, **exact), **x)
    for got, w in zip(OURS(0.99, 0.95, **x), want, strict=True):
        close(got, w, 1e-12)


def test_theirs_is_wrong_float64_with_a_python_gamma_is_computed_in_float32():
    x = trajectories((2, 200, 1))
    right = expected_gae(0.99, 0.95, x)[0]
    assert LOOP(0.99, 0.95, **x)[0].dtype == torch.float64
    assert (LOOP(0.99, 0.95, **x)[0] - right).abs().max() > 1e-8
    assert (VECTORISED(0.99, 0.95, **x)[0] - right).abs().max() > 1e-9
    close(OURS(0.99, 0.95, **x)[0], right, 1e-13)


@pytest.mark.parametrize("lmbda", [0.0, 1e-8])
def test_theirs_is_wrong_the_vectorised_one_has_no_lambda_of_0(lmbda):
    x = trajectories((1, 4, 1))
    with pytest.raises(IndexError):
        VECTORISED(0.99, lmbda, **x)
    close(OURS(0.99, lmbda, **x)[0], expected_gae(0.99, lmbda, x)[0], 1e-12)


@THEIRS
def test_theirs_is_wrong_an_undefined_value_after_a_termination_spreads(theirs):
    zero, ended = torch.zeros(1, 3, 1), torch.tensor([[[False], [True], [False]]])
    following = torch.tensor([[[0.0], [NAN], [0.0]]])
    assert theirs(0.5, 1.0, zero, following, zero + 1, ended)[0].flatten().isnan().tolist() == [True, True, False]
    assert OURS(0.5, 1.0, zero, following, zero + 1, ended)[0].flatten().tolist() == [1.5, 1.0, 1.0]


def rollout(shape: tuple[int, ...]) -> TensorDict:
    x = trajectories((*shape, 1), torch.float32)
    following = {"state_value": x["next_state_value"], **{k: x[k] for k in ("reward", "done", "terminated")}}
    return TensorDict({"state_value": x["state_value"], "next": TensorDict(following, shape)}, shape)


@pytest.fixture
def installed():
    torchrl.install()
    torchrl.install()  # twice is once
    yield
    torchrl.uninstall()


@pytest.mark.parametrize("options", [{}, {"vectorized": False}, {"average_gae": True}, {"auto_reset_env": True}])
def test_install_reaches_torchrls_estimators(installed, options, monkeypatch):
    batch = rollout((3, 25))
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    calls = []
    monkeypatch.setattr(torchrl, "gae", lambda *args, real=torchrl.gae, **kw: calls.append(1) or real(*args, **kw))
    estimator = GAE(gamma=0.99, lmbda=0.95, value_network=None, **options)
    got = estimator(batch.clone())
    assert calls == [1]
    torchrl.uninstall()
    want = estimator(batch.clone())
    assert calls == [1]
    for key in ("advantage", "value_target"):
        close(got[key], want[key])


def test_install_reaches_the_multi_agent_estimator(installed):
    batch = rollout((2, 25))
    batch["state_value"] = torch.randn(2, 25, 3, 1)
    batch["next", "state_value"] = torch.randn(2, 25, 3, 1)
    got = MultiAgentGAE(gamma=0.99, lmbda=0.95, value_network=None)(batch.clone())
    torchrl.uninstall()
    close(got["advantage"], MultiAgentGAE(gamma=0.99, lmbda=0.95, value_network=None)(batch)["advantage"])


def test_gae_refuses_what_it_does_not_compute():
    x = trajectories((2, 5, 1))
    with pytest.raises(NotImplementedError, match="gamma"):
        OURS(torch.full((2, 5, 1), 0.9), 0.95, **x)
    with pytest.raises(NotImplementedError, match="differentiable"):
        OURS(0.9, 0.95, **{**x, "reward": x["reward"].requires_grad_()})
    with pytest.raises(ValueError, match=r"done has shape \[2, 5\]"):
        OURS(0.9, 0.95, **{**x, "done": x["done"].squeeze(-1)})


# -- ClipPPOLoss -----------------------------------------------------------------------------------------------------

ACTIONS, FEATURES, LOSSES = 5, 4, ("loss_objective", "loss_entropy", "loss_critic")


def networks(distribution: type = Categorical) -> tuple[ProbabilisticActor, TensorDictModule]:
    actor = TensorDictModule(nn.Linear(FEATURES, ACTIONS).double(), ["observation"], ["logits"])
    critic = TensorDictModule(nn.Linear(FEATURES, 1).double(), ["observation"], ["state_value"])
    return ProbabilisticActor(actor, in_keys=["logits"], distribution_class=distribution), critic


def experience(shape: tuple[int, ...], distribution: type = Categorical) -> TensorDict:
    """log ratios and value errors far enough for every clip, on both sides of 1 for smooth_l1."""
    batch = {
        "observation": torch.randn(*shape, FEATURES, dtype=torch.float64),
        "action": torch.randint(ACTIONS, shape),
        "action_log_prob": -1.6 + 0.5 * torch.randn(shape, dtype=torch.float64),
        "advantage": torch.randn(*shape, 1, dtype=torch.float64),
        "value_target": 1.5 * torch.randn(*shape, 1, dtype=torch.float64),
        "state_value": 0.3 * torch.randn(*shape, 1, dtype=torch.float64),
    }
    if distribution is OneHotCategorical:
        batch["action"] = nn.functional.one_hot(batch["action"], ACTIONS)
    return TensorDict(batch, shape)


def gradients(loss: Tensor, *modules: nn.Module) -> list[Tensor]:
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(loss.sum(), parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def compare(options: dict, batch: TensorDict, distribution: type = Categorical, rel: float = 3e-7) -> TensorDict:
    """Every loss entry and its gradient; rel: torchrl holds its coefficients in float32."""
    actor, critic = networks(distribution)
    theirs, ours = (kind(actor, critic, functional=False, **options) for kind in (ClipPPOLoss, FusedClipPPOLoss))
    want, got = theirs(batch.clone()), ours(batch.clone())
    assert set(got.keys()) == set(want.keys())
    for key in LOSSES:
        if key in want.keys():  # noqa: SIM118  # a TensorDict
            close(got[key], want[key], rel, key)
            for g, w in zip(gradients(got[key], actor, critic), gradients(want[key], actor, critic), strict=True):
                close(g, w, rel, f"gradient of {key}")
    return got


OPTIONS = {
    "defaults": {},
    "clip_epsilon": {"clip_epsilon": 0.1},
    "clip_higher": {"clip_epsilon": (0.2, 0.28)},
    "entropy_coeff": {"entropy_coeff": 0.3},
    "no_entropy": {"entropy_bonus": False},
    "critic_coeff": {"critic_coeff": 0.5},
    "l2": {"loss_critic_type": "l2"},
    "clip_value": {"clip_value": 0.2},
    "clip_value_is_clip_epsilon": {"clip_value": True, "loss_critic_type": "l2"},
    "normalize_advantage": {"normalize_advantage": True},
    "sum": {"reduction": "sum", "clip_value": 0.2},
    "none": {"reduction": "none", "clip_value": 0.2, "loss_critic_type": "l2"},
    "separate_losses": {"separate_losses": True},
    "no_explained_variance": {"log_explained_variance": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shape", [(64,), (4, 16)], ids=["batch", "batch_and_time"])
def test_clip_ppo_loss_values_and_gradients(options, shape):
    compare(options, experience(shape))


def test_clip_ppo_loss_diagnostics_of_a_flat_batch():
    actor, critic = networks()
    batch = experience((64,))
    theirs, ours = (kind(actor, critic) for kind in (ClipPPOLoss, FusedClipPPOLoss))
    want, got = theirs(batch.clone()), ours(batch.clone())
    for key in ("entropy", "kl_approx", "ESS", "max_ratio", "mean_ratio", "explained_variance"):
        close(got[key], want[key].squeeze(), FP32, key)
    assert 0 < got["clip_fraction"] < want["clip_fraction"]  # theirs counts ratios outside whatever the advantage


def test_clip_ppo_loss_one_hot_actions():
    compare({}, experience((64,), OneHotCategorical), OneHotCategorical)


def test_clip_ppo_loss_called_with_keywords_and_functional_parameters():
    actor, critic = networks()
    batch = experience((8,))
    ended = torch.zeros(8, 1, dtype=torch.bool)
    given = {name: batch[name] for name in ("observation", "action", "action_log_prob")}
    given |= {"next_reward": torch.randn(8, 1).double(), "next_done": ended, "next_terminated": ended}
    found = []
    for kind in (ClipPPOLoss, FusedClipPPOLoss):
        loss = kind(actor, critic, log_explained_variance=False)
        loss.make_value_estimator(gamma=0.99, lmbda=0.95)
        out = dict(zip(loss.out_keys, loss(**given, next_observation=batch["observation"]), strict=True))
        sum(out[key] for key in LOSSES).backward()
        weights = [
            loss.actor_network_params["module", "0", "module", "weight"],
            loss.critic_network_params["module", "weight"],
        ]
        found.append((out, [w.grad for w in weights]))
    (theirs, their_grads), (ours, our_grads) = found
    for key in LOSSES:
        close(ours[key], theirs[key], 3e-7, key)
    for got, want in zip(our_grads, their_grads, strict=True):
        close(got, want, 3e-7)


def test_clip_ppo_loss_computes_the_advantage_when_it_is_missing():
    actor, critic = networks()
    batch = experience((4, 16)).exclude("advantage", "value_target", "state_value")
    following = {
        "reward": torch.randn(4, 16, 1, dtype=torch.float64),
        "observation": torch.randn(4, 16, FEATURES).double(),
    }
    ended = {"done": torch.rand(4, 16, 1) < 0.2, "terminated": torch.zeros(4, 16, 1, dtype=torch.bool)}
    batch["next"] = TensorDict({**following, **ended}, (4, 16))
    found = []
    for kind in (ClipPPOLoss, FusedClipPPOLoss):
        loss = kind(actor, critic)
        loss.make_value_estimator(gamma=0.99, lmbda=0.95)
        found.append(loss(batch.clone()))
    for key in LOSSES:
        close(found[1][key], found[0][key], 3e-7, key)


def test_clip_ppo_loss_with_torchrls_loss_mask():
    batch = experience((4, 16))
    valid = torch.rand(4, 16) < 0.6
    batch["collector"] = TensorDict({"mask": valid}, (4, 16))
    got = compare({"clip_value": 0.2}, batch)
    small = compare({"clip_value": 0.2}, experience((4, 16))[valid].update(batch[valid].exclude("collector")))
    for key in (*LOSSES, "kl_approx", "entropy", "ESS", "mean_ratio"):
        assert got[key].shape == ()
    assert small.keys() == got.keys()


def test_theirs_is_wrong_diagnostics_count_masked_positions():
    batch = experience((64,))
    valid = torch.arange(64) < 16
    batch["collector"] = TensorDict({"mask": valid}, (64,))
    actor, critic = networks()
    theirs, ours = ClipPPOLoss(actor, critic), FusedClipPPOLoss(actor, critic)
    alone = theirs(batch[:16].exclude("collector"))
    for key in ("kl_approx", "entropy", "mean_ratio", "ESS"):
        close(ours(batch.clone())[key], alone[key], FP32, key)
        assert abs(theirs(batch.clone())[key] - alone[key]) > 1e-3, key


def on_logits(kind: type, logits: Tensor, batch: dict[str, Tensor], **options) -> TensorDict:
    """The loss of logits that are a leaf."""
    identity = TensorDictModule(nn.Identity(), ["observation"], ["logits"])
    actor = ProbabilisticActor(identity, in_keys=["logits"], distribution_class=Categorical)
    loss = kind(actor, critic_coeff=None, functional=False, device=torch.device("cpu"), **options)
    return loss(TensorDict({"observation": logits, **batch}, logits.shape[:1]))


def test_theirs_is_wrong_a_ratio_that_overflows_makes_the_gradient_nan():
    batch = {
        "action": torch.tensor([0]),
        "action_log_prob": torch.tensor([-100.0]),
        "advantage": torch.tensor([[1.0]]),
    }
    found = {}
    for kind in (ClipPPOLoss, FusedClipPPOLoss):
        logits = torch.zeros(1, 2, requires_grad=True)
        out = on_logits(kind, logits, batch)["loss_objective"]
        close(out, torch.tensor(-1.2))
        found[kind] = torch.autograd.grad(out, logits)[0]
    assert found[ClipPPOLoss].isnan().all()
    assert (found[FusedClipPPOLoss] == 0).all()


def test_theirs_is_wrong_a_masked_row_of_nan_logits_makes_their_gradient_nan(monkeypatch):
    monkeypatch.setattr(Categorical, "_validate_args", False)  # or a NaN is an error at once
    batch = {
        "action": torch.tensor([0, 1]),
        "action_log_prob": torch.tensor([-0.7, NAN]),
        "advantage": torch.tensor([[1.0], [NAN]]),
        "collector": TensorDict({"mask": torch.tensor([True, False])}, (2,)),
    }
    found = {}
    for kind in (ClipPPOLoss, FusedClipPPOLoss):
        logits = torch.tensor([[0.1, 0.2], [NAN, NAN]], requires_grad=True)
        out = on_logits(kind, logits, batch, entropy_bonus=False)["loss_objective"]
        close(out, -(torch.tensor([0.1, 0.2]).log_softmax(0)[0] + 0.7).exp())
        found[kind] = torch.autograd.grad(out, logits)[0]
    close(found[FusedClipPPOLoss][0], found[ClipPPOLoss][0])
    assert found[ClipPPOLoss][1].isnan().all()
    assert (found[FusedClipPPOLoss][1] == 0).all()


def test_clip_ppo_loss_is_fused_ppo_loss_with_the_preset():
    actor, critic = networks()
    batch = experience((64,))
    out = ClipPPOLoss(actor, critic, clip_value=0.2, clip_epsilon=(0.2, 0.28))(batch.clone())
    logits = actor.get_dist(batch).logits
    ours = fused_ppo_loss(
        logits,
        batch["action"],
        batch["action_log_prob"],
        batch["advantage"].squeeze(-1),
        config=PPOLossConfig.torchrl(value_clip=0.2, clip_high=0.28),
        values=critic(batch.clone())["state_value"].squeeze(-1),
        old_values=batch["state_value"].squeeze(-1),
        returns=batch["value_target"].squeeze(-1),
    )
    close(ours.loss, sum(out[key] for key in LOSSES), 3e-7)


def test_normalize_advantage_is_masked_whiten_with_the_deviation_clamped():
    x = torch.randn(32, 1, dtype=torch.float64)
    actor, critic = networks()
    loss, batch = ClipPPOLoss(actor, critic, normalize_advantage=True), TensorDict({}, (32,))
    for scaled in (x, 1e-9 * x):
        want = loss._standardize_advantage(scaled, batch)
        close(masked_whiten(scaled, **WHITEN_OPTIONS["torchrl"]), want, 1e-9)


def test_clip_ppo_loss_refuses_what_it_does_not_compute():
    actor, critic = networks()
    refused = [
        {"loss_critic_type": "l1"},
        {"delay_actor": True},
        {"max_importance_ratio": 2.0},
        {"entropy_coeff": {"action": 0.1}},
    ]
    for options in refused:
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            FusedClipPPOLoss(actor, critic, **options)
    batch = experience((4,))
    with pytest.raises(ValueError, match="advantages has shape"):
        FusedClipPPOLoss(actor, critic)(batch.set("advantage", torch.randn(4, 3)))
    masked = TensorDictModule(lambda x: (x, x > -9), ["observation"], ["logits", "mask"])
    actor = ProbabilisticActor(masked, in_keys=["logits", "mask"], distribution_class=MaskedCategorical)
    with pytest.raises(NotImplementedError, match="MaskedCategorical"):
        FusedClipPPOLoss(actor, critic)


# -- GRPOLoss: language models ---------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """What GRPOLoss asks of an actor, with given logits."""

    in_keys, out_keys = ("logits",), ()

    def get_dist(self, tensordict: TensorDict, logits_key: str = "logits") -> LLMMaskedCategorical:
        return LLMMaskedCategorical(logits=tensordict.get("logits"), mask=tensordict.get("mask"))


def completions(kind: str = "lengths") -> TensorDict:
    shape, vocab = (6, 9), 11
    valid = mask(kind, shape).bool()
    logits = torch.randn(*shape, vocab, requires_grad=True)
    tokens = torch.randint(vocab, shape)
    logprobs = logits.detach().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    batch = {
        "logits": logits,
        "mask": valid,
        ("tokens", "full"): tokens.masked_fill(~valid, -100),
        ("log_probs", "full"): logprobs + 0.4 * torch.randn(shape),
        ("next", "ref_log_probs", "full"): logprobs + 0.4 * torch.randn(shape),
        "advantage": torch.randn(*shape, 1),
    }
    return TensorDict(batch, shape[:1])


def ours_of(batch: TensorDict, config: PPOLossConfig, **given):
    return fused_ppo_loss(
        batch["logits"],
        batch["tokens", "full"].clamp(min=0),
        batch["log_probs", "full"],
        batch["advantage"].squeeze(-1),
        batch["mask"],
        config=config,
        **given,
    )


AGGREGATIONS = {
    "token_mean": {},
    "prompt_mean": {"aggregation": "seq-mean-token-mean", "agg_include_empty": True},
    "none": {"aggregation": "none"},
}


@pytest.mark.parametrize("kind", ["all", "lengths", "holes"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", [GRPOLoss, DAPO])
def test_grpo_objective_and_entropy(loss, aggregation, kind):
    batch = completions(kind)
    high = 0.28 if loss is DAPO else 0.2
    theirs = loss(LanguageModel(), aggregation=aggregation, clip_epsilon=(0.2, high), masking_strategy="generic")(batch)
    config = PPOLossConfig.torchrl(clip_high=high, **AGGREGATIONS[aggregation])
    got = ours_of(batch, config).loss
    want = (
        (theirs.loss_objective + theirs.loss_entropy).squeeze(-1)
        if aggregation != "token_mean"
        else (theirs.loss_objective + theirs.loss_entropy)
    )
    close(got, want)
    mine, other = (torch.autograd.grad(x.sum(), batch["logits"], retain_graph=True)[0] for x in (got, want))
    close(mine, other)


def test_theirs_is_wrong_grpo_divides_the_kl_by_all_positions():
    batch = completions("lengths")
    theirs = GRPOLoss(LanguageModel(), kl_to_ref_coeff=0.1, entropy_bonus=False, masking_strategy="generic")(batch)
    config = PPOLossConfig.torchrl(entropy_coef=0.0, kl_coef=0.1)
    got = ours_of(batch, config, ref_logprobs=batch["next", "ref_log_probs", "full"])
    share = batch["mask"].sum() / batch["mask"].numel()
    close(got.kl * share, theirs.kl_to_ref)
    assert share < 0.8


def test_theirs_is_wrong_cispo_has_no_gradient_where_it_clips():
    batch = completions("all")
    theirs = CISPOLoss(LanguageModel(), entropy_bonus=False, masking_strategy="generic")(batch).loss_objective
    out = ours_of(batch, PPOLossConfig.torchrl(entropy_coef=0.0, loss_type="cispo", per_token_outputs=("ratio",)))
    clipped = (out.per_token["ratio"] - 1).abs() > 0.2
    assert clipped.any()
    gradient = torch.autograd.grad(theirs, batch["logits"])[0]
    assert (gradient[clipped] == 0).all()
    assert (torch.autograd.grad(out.loss, batch["logits"])[0][clipped].abs().sum(-1) > 0).all()


def test_ppo_loss_of_torchrls_log_probs():
    """The same from log-probs, as an actor with another distribution needs it."""
    actor, critic = networks()
    batch = experience((64,))
    dist = actor.get_dist(batch)
    config = PPOLossConfig.torchrl(entropy_coef=0.02)
    out = ppo_loss(
        dist.log_prob(batch["action"]),
        batch["action_log_prob"],
        batch["advantage"].squeeze(-1),
        entropy=dist.entropy(),
        config=config,
    )
    want = ClipPPOLoss(actor, critic, entropy_coeff=0.02)(batch.clone())
    close(out.loss, want["loss_objective"] + want["loss_entropy"], 3e-7)
