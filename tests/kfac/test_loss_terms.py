"""T8: how many terms a loss has, whatever reduction, padding, repetition and split of a batch; exact and sampled G."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from kfac.curvature.fisher import class_weighted_terms, counted_terms, fisher_vectors
from tests.kfac.oracle import Loss, distance, empirical_blocks, ggn_blocks
from tests.kfac.ranks import run_ranks

D = torch.float64
KINDS = ("classification", "regression", "binary")
FISHERS = ("empirical", "mc", "exact")
REDUCTIONS = ("mean", "sum")
IGNORED = -7
CLASSES, TOKENS = 3, 4


def net() -> nn.Sequential:
    """Works on every token by itself."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).to(D)


def data(kind: str, samples: int, ignored: float = 0.0) -> tuple[Tensor, Tensor]:
    """Inputs ``[N, S, 3]`` and targets per token, ``[N, S]`` or ``[N, S, 3]``."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, TOKENS, 3, generator=generator, dtype=D)
    if kind == "regression":
        return x, torch.randn(samples, TOKENS, CLASSES, generator=generator, dtype=D)
    if kind == "binary":
        return x, torch.randint(0, 2, (samples, TOKENS, CLASSES), generator=generator).to(D)
    y = torch.randint(0, CLASSES, (samples, TOKENS), generator=generator)
    y[torch.rand(samples, TOKENS, generator=generator) < ignored] = IGNORED
    return x, y


def outputs_of(model: nn.Module, x: Tensor, kind: str) -> Tensor:
    """In the layout of the loss: for a classification, classes come second."""
    outputs = model(x)
    return outputs.movedim(-1, 1) if kind == "classification" else outputs


Factors = dict[str, tuple[Tensor, Tensor]]


def passes(kfac: KFAC, model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *, weight=1.0, told=True) -> None:
    """A forward and a backward pass; ``told``: with the context."""
    outputs = outputs_of(model, x, loss.kind)
    total = weight * loss(outputs, y)
    if told:
        with kfac.curvature(outputs, loss.kind, weight, targets=y, ignore_index=IGNORED):
            total.backward()
    else:
        total.backward()


def factors_of(kfac: KFAC) -> Factors:
    return {layer.name: (kfac.factor(layer.name, "A"), kfac.factor(layer.name, "G")) for layer in kfac.layers}


def factors(x: Tensor, y: Tensor, loss: Loss, fisher: str, *, told: bool = True) -> Factors:
    torch.manual_seed(1)
    model = net()
    kfac = KFAC(model, KFACConfig(fisher=fisher, loss_reduction=loss.reduction))
    passes(kfac, model, x, y, loss, told=told)
    kfac.step()
    return factors_of(kfac)


def blocks(some: Factors) -> dict[str, Tensor]:
    return {name: torch.kron(g, a) for name, (a, g) in some.items()}


def losses(*kinds: str) -> list[Loss]:
    return [Loss(kind, reduction, IGNORED) for kind in kinds for reduction in REDUCTIONS]


# ---------------------------------------------------------------------- tokens


@pytest.mark.parametrize("fisher", FISHERS)
def test_tokens_of_sequences_count_like_tokens_alone(fisher):
    """K-FAC of ``[N, S, d]`` is K-FAC of the ``[N S, d]`` model, also with padding."""
    for loss in losses(*KINDS):
        x, y = data(loss.kind, 5, ignored=0.4)
        ours = blocks(factors(x, y, loss, fisher))
        flat = blocks(factors(x.flatten(0, 1), y.flatten(0, 1), loss, fisher))
        assert distance(ours, flat) < 1e-12, loss


def test_control_without_being_told_tokens_are_taken_for_samples():
    x, y = data("classification", 5)
    loss = Loss("classification")
    told, untold = (factors(x, y, loss, "empirical", told=t) for t in (True, False))
    for name in told:
        torch.testing.assert_close(told[name][0], untold[name][0])
        torch.testing.assert_close(told[name][1], TOKENS * untold[name][1])


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_where_k_fac_is_exact_it_is_the_curvature_of_torch_func(fisher):
    """Tokens with the same input and different labels, some of which do not count."""
    for loss in losses("classification", "regression", "binary"):
        x, y = data(loss.kind, 3, ignored=0.4)
        x = x[:1, :1].expand(x.shape)
        if loss.kind == "classification":
            assert 0 < (y == IGNORED).sum() < y.numel()
        truth = (empirical_blocks if fisher == "empirical" else ggn_blocks)(
            net(), x.flatten(0, 1), y.flatten(0, 1), loss
        )
        assert distance(blocks(factors(x, y, loss, fisher)), truth) < 1e-10, loss


def test_deep_linear_regression_of_tokens_is_exact():
    x, y = data("regression", 5)
    for loss in losses("regression"):
        model = nn.Sequential(*(layer for layer in net() if isinstance(layer, nn.Linear)))
        kfac = KFAC(model, KFACConfig(fisher="exact", loss_reduction=loss.reduction))
        passes(kfac, model, x, y, loss)
        kfac.step()
        kfac.close()
        assert distance(blocks(factors_of(kfac)), ggn_blocks(model, x, y, loss)) < 1e-10


# ---------------------------------------------------------------------- T8


@pytest.mark.parametrize("copies", [2, 8, 32])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_t8a_repeating_every_datum_changes_nothing(fisher, copies):
    for kind in KINDS:
        x, y = data(kind, 3, ignored=0.4)
        once, often = (
            factors(x.repeat(k, 1, 1), y.repeat(k, *[1] * (y.dim() - 1)), Loss(kind, "mean", IGNORED), fisher)
            for k in (1, copies)
        )
        for name, pair in once.items():
            torch.testing.assert_close(often[name], pair, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("fisher", FISHERS)
def test_t8b_a_sum_has_as_many_times_the_curvature_of_the_mean_as_it_has_terms(fisher):
    x, y = data("classification", 5, ignored=0.4)
    terms = int((y != IGNORED).sum())
    mean, total = (factors(x, y, Loss("classification", r, IGNORED), fisher) for r in REDUCTIONS)
    for name in mean:
        torch.testing.assert_close(total[name][0], mean[name][0])
        torch.testing.assert_close(total[name][1], terms * mean[name][1], rtol=1e-10, atol=1e-14)
    assert terms not in (len(x), y.numel()), "the comparison would not tell terms from samples or tokens"


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_t8c_terms_that_do_not_count_are_not_there(fisher):
    """G is that of the other tokens alone; A sees all inputs."""
    for loss in losses("classification"):
        x, y = data("classification", 5, ignored=0.4)
        x, y = x.flatten(0, 1), y.flatten()
        counted = y != IGNORED
        ours, others = factors(x, y, loss, fisher), factors(x[counted], y[counted], loss, fisher)
        for name in ours:
            torch.testing.assert_close(ours[name][1], others[name][1], rtol=1e-10, atol=1e-14)
            assert (ours[name][0] - others[name][0]).norm() > 0.01


def test_sampled_vectors_of_ignored_terms_are_zero_and_a_batch_without_terms_is_finite():
    x, y = data("classification", 4, ignored=0.5)
    outputs = outputs_of(net(), x, "classification")
    counted = counted_terms(outputs, "classification", y, IGNORED)
    (vector,) = fisher_vectors(outputs, "classification", 1, counted=counted)
    used = vector.movedim(1, -1).norm(dim=-1) > 0
    assert torch.equal(used, y != IGNORED)
    none = torch.zeros_like(counted)
    (vector,) = fisher_vectors(outputs, "classification", 1, counted=none)
    assert torch.equal(vector, torch.zeros_like(vector))


# ---------------------------------------------------------------------- ranks and micro-batches

SHARDS = {1: ((slice(0, 7), (7,)),), 2: ((slice(0, 5), (3, 2)), (slice(5, 7), (1, 1)))}
"""Per number of ranks each one's shard and its micro-batches."""


def _split(rank, world_size):
    """Per loss and Fisher type the factors of two steps over unequal shards in unequal micro-batches."""
    multinomial, normal, bernoulli = torch.multinomial, torch.randn_like, torch.bernoulli
    torch.multinomial = lambda p, _: p.argmax(1, keepdim=True)  # sampled alike, however the batch is split
    torch.randn_like, torch.bernoulli = torch.ones_like, torch.round
    try:
        result = {}
        for loss, fisher in itertools.product(losses(*KINDS), FISHERS):
            model = net()
            config = KFACConfig(fisher=fisher, loss_reduction=loss.reduction, accumulation_steps=world_size)
            kfac = KFAC(model, config, average_gradients=True)
            x, y = data(loss.kind, 7, ignored=0.4)
            for _ in range(2):
                model.zero_grad()
                mine, sizes = SHARDS[world_size][rank]
                for micro_x, micro_y in zip(x[mine].split(sizes), y[mine].split(sizes), strict=True):
                    share = loss.count(micro_y) * world_size / loss.count(y)
                    passes(kfac, model, micro_x, micro_y, loss, weight=share if loss.reduction == "mean" else 1.0)
                kfac.step()
            result[loss.kind, loss.reduction, fisher] = factors_of(kfac)
            kfac.close()
        return result
    finally:
        torch.multinomial, torch.randn_like, torch.bernoulli = multinomial, normal, bernoulli


def test_terms_are_summed_over_ranks_and_micro_batches():
    (alone,) = run_ranks(_split, 1)
    for split in run_ranks(_split, 2):
        for (kind, reduction, fisher), expected in alone.items():
            for name, (a, g) in expected.items():
                ours = split[kind, reduction, fisher][name]
                torch.testing.assert_close(ours[0], a, rtol=1e-10, atol=1e-14)
                scale = 0.5 if reduction == "sum" else 1.0  # gradients are averaged over the ranks, so the sum is
                torch.testing.assert_close(ours[1], scale * g, rtol=1e-10, atol=1e-14)


# ---------------------------------------------------------------------- the vectors themselves


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_vectors_are_roots_of_the_loss_hessian(kind, reduction):
    """Of all outputs of a sample together: terms of one sample have nothing to do with each other."""
    x, y = data(kind, 2, ignored=0.3)
    loss = Loss(kind, reduction, IGNORED)
    outputs = outputs_of(net(), x, kind).detach()
    hessian = torch.func.hessian(lambda z: loss(z, y))(outputs).reshape(2, outputs[0].numel(), 2, -1)
    counted = counted_terms(outputs, kind, y, IGNORED)
    squares = sum(
        torch.einsum("ni,nj->nij", v.flatten(1), v.flatten(1))
        for v in fisher_vectors(outputs, kind, None, reduction=reduction, counted=counted)
    )
    terms = loss.count(y) if reduction == "mean" else 1
    for n in range(2):
        torch.testing.assert_close(squares[n] * terms, hessian[n, :, n], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_vectors_have_the_loss_hessian_as_their_covariance(kind, reduction):
    torch.manual_seed(0)
    outputs = torch.randn(1, CLASSES, dtype=D).expand(200_000, -1)
    (vector,) = fisher_vectors(outputs, kind, 1, reduction=reduction)
    scale = len(outputs) if reduction == "mean" else 1 / len(outputs)
    exact = sum(v[0].outer(v[0]) for v in fisher_vectors(outputs[:1], kind, None, reduction=reduction))
    torch.testing.assert_close(vector.T @ vector * scale, exact, rtol=0.0, atol=0.02 * exact.max().item())
    wrong = (2**0.5 * vector).T @ (2**0.5 * vector) * scale
    assert (wrong - exact).norm() > 0.3 * exact.norm(), "twice the variance must be noticed"


def test_half_precision_outputs_get_vectors_of_their_own_dtype():
    outputs = torch.randn(512, 10, dtype=torch.float16)
    (vector,) = fisher_vectors(outputs, "classification", 1, factor=1024.0)
    assert vector.dtype == torch.float16
    assert vector.isfinite().all()
    assert (vector != 0).float().mean() > 0.99, "without a factor most would be rounded to zero"
    (small,) = fisher_vectors(outputs * 3, "classification", 1, factor=1e-3)
    assert (small != 0).float().mean() < 0.9


# ---------------------------------------------------------------------- class weights

WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=D)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_exact_vectors_with_class_weights_are_roots_of_the_loss_hessian(reduction):
    x, y = data("classification", 2, ignored=0.3)
    outputs = outputs_of(net(), x, "classification").detach()

    def loss(z: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(z, y, weights, ignore_index=IGNORED, reduction=reduction)

    hessian, unweighted = (
        torch.func.hessian(loss)(outputs, weights).reshape(2, outputs[0].numel(), 2, -1)
        for weights in (WEIGHTS, torch.ones_like(WEIGHTS))
    )
    weights = class_weighted_terms(outputs, "classification", y, IGNORED, WEIGHTS)
    squares = sum(
        torch.einsum("ni,nj->nij", v.flatten(1), v.flatten(1))
        for v in fisher_vectors(outputs, "classification", None, reduction=reduction, counted=weights)
    )
    total = weights.sum() if reduction == "mean" else 1
    for n in range(2):
        torch.testing.assert_close(squares[n] * total, hessian[n, :, n], rtol=1e-10, atol=1e-14)
        assert (hessian[n, :, n] - unweighted[n, :, n]).norm() > 0.1 * hessian[n, :, n].norm()


def _weighted(sizes: tuple[int, ...], fisher: str = "exact", factor: float = 1.0) -> Factors:
    """Factors of a batch in micro-batches, for class weights times a factor."""
    model = net()
    kfac = KFAC(model, KFACConfig(fisher=fisher, accumulation_steps=len(sizes)))
    x, y = data("classification", 5, ignored=0.3)
    weights = factor * WEIGHTS
    total = weights[y[y != IGNORED]].sum()
    for micro_x, micro_y in zip(x.split(sizes), y.split(sizes), strict=True):
        outputs = outputs_of(model, micro_x, "classification")
        share = float(weights[micro_y[micro_y != IGNORED]].sum() / total)
        context = kfac.curvature(
            outputs, "classification", share, targets=micro_y, ignore_index=IGNORED, class_weights=weights
        )
        with context:
            (share * F.cross_entropy(outputs, micro_y, weights, ignore_index=IGNORED)).backward()
    kfac.step()
    return factors_of(kfac)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_class_weights_do_not_depend_on_their_scale_or_on_how_a_batch_is_split(fisher):
    whole = _weighted((5,), fisher)
    for other in (_weighted((3, 2), fisher), _weighted((5,), fisher, 1e-3)):
        for name, pair in whole.items():
            torch.testing.assert_close(other[name], pair, rtol=1e-10, atol=1e-14)


def test_class_weights_that_cannot_be_right_are_named():
    kfac = KFAC(net())
    outputs = torch.zeros(2, CLASSES, requires_grad=True)
    labels = torch.zeros(2, dtype=torch.long)
    for kind, targets, weights, message in (
        ("classification", None, WEIGHTS, "targets=labels"),
        ("classification", torch.zeros(2, CLASSES), WEIGHTS, "targets=labels"),
        ("regression", torch.zeros(2, CLASSES), WEIGHTS, "classification with"),
        ("classification", labels, WEIGHTS[:2], r"\(2,\).*each of the 3 classes"),
    ):
        with pytest.raises(ValueError, match=message):
            kfac.curvature(outputs, kind, targets=targets, class_weights=weights).__enter__()


# ---------------------------------------------------------------------- misuse


def test_losses_that_do_not_fit_are_named():
    model = net()
    kfac = KFAC(model)
    outputs = model(data("classification", 2)[0])
    for arguments, message in (
        ((outputs, "hinge"), r"hinge.*classification, regression, binary"),
        ((outputs[0, 0], "classification"), r"\(3,\).*\[rows, classes"),
    ):
        with pytest.raises(ValueError, match=message), kfac.curvature(*arguments):
            pass
    labels, floats = torch.zeros(2, TOKENS, dtype=torch.long), torch.zeros(2, TOKENS, dtype=D)
    moved = outputs.movedim(-1, 1)
    for arguments, targets, message in (
        ((outputs, "classification"), labels, r"\(2, 4\) do not fit.*\(2, 4, 3\): .*outputs\.movedim\(-1, 1\)"),
        ((moved, "classification"), floats, r"targets\.long\(\)"),
        ((moved, "classification"), moved.long(), r"targets\.float\(\)"),
        ((moved, "classification"), labels[:1], r"\(1, 4\) do not fit.*pass targets of shape \(2, 4\)"),
        ((moved[:, :1, 0], "regression"), floats[:, 0], r"\(2,\) do not fit.*\(2, 1\).*broadcast"),
        ((outputs, "binary"), floats[..., None], r"\(2, 4, 1\) do not fit.*\(2, 4, 3\).*broadcast"),
    ):
        with pytest.raises(ValueError, match=message):
            kfac.curvature(*arguments, targets=targets).__enter__()
    images = torch.zeros(2, 3, 2, 2)
    for targets in (images, images.flatten(1)):  # that are flattened for the context, or not
        with kfac.curvature(images.flatten(1), "binary", targets=targets):
            pass


def test_some_passes_told_and_some_not_is_refused():
    model = net()
    kfac = KFAC(model, KFACConfig(accumulation_steps=2))
    x, y = data("classification", 4)
    passes(kfac, model, x, y, Loss("classification"), told=False)
    with pytest.raises(RuntimeError, match=r"outside `with kfac\.curvature"):
        passes(kfac, model, x, y, Loss("classification"))


def test_probabilities_as_targets_all_count():
    model = net()
    kfac = KFAC(model)
    x, _ = data("classification", 4)
    outputs = outputs_of(model, x, "classification")
    targets = torch.full_like(outputs, 1 / CLASSES).detach()
    with kfac.curvature(outputs, "classification", targets=targets):
        F.cross_entropy(outputs, targets).backward()
    kfac.step()
    assert kfac.factor("2", "G").isfinite().all()
