"""Losses, metrics and the form in which K-FAC knows them, against their definitions; runs that use them."""

import pytest
import torch
import torch.nn.functional as F

from experiments.data import load_data
from experiments.groups import DataSettings
from experiments.models import build_model
from experiments.objectives import Classification, Reconstruction, objective_of, summed_terms
from experiments.records import find_records
from kfac import KFAC, KFACConfig
from kfac.curvature.fisher import fisher_vectors


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_classification_counts_every_position():
    logits, labels = torch.randn(3, 5, 4), torch.randint(0, 5, (3, 4))
    objective = objective_of("gpt")
    rows = logits.movedim(1, 2).reshape(12, 5)
    picked = rows.log_softmax(1)[torch.arange(12), labels.flatten()]
    assert objective.loss(logits, labels).item() == pytest.approx(-picked.mean().item(), rel=1e-6)
    right = sum(int(row.argmax()) == int(label) for row, label in zip(rows, labels.flatten(), strict=True))
    assert objective.measure(logits, labels).item() == pytest.approx(right / 12)
    assert objective.terms(labels) == 12


def test_reconstruction_is_the_bernoulli_likelihood_of_an_image():
    z, x = torch.randn(3, 1, 2, 2, dtype=torch.float64), torch.rand(3, 1, 2, 2, dtype=torch.float64)
    p = 1 / (1 + (-z).exp())
    expected = -(x * p.log() + (1 - x) * (1 - p).log()).sum() / 3
    objective = objective_of("autoencoder")
    assert objective.loss(z, x).item() == pytest.approx(expected.item(), rel=1e-12)
    assert objective.measure(z, x).item() == pytest.approx(((p - x) ** 2).sum().item() / 3, rel=1e-12)
    assert objective.targets(x, torch.tensor([1, 2, 3])) is x
    assert objective.terms(x) == 3


def test_the_fisher_of_a_reconstruction_is_its_hessian():
    """Of an image's summed Bernoulli losses: exactly from the exact vectors, on average from sampled ones."""
    z = torch.tensor([[[[0.3, -1.2], [2.0, 0.1]]]], dtype=torch.float64)
    loss = lambda logits: Reconstruction().loss(logits.view(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))  # noqa: E731
    hessian = torch.autograd.functional.hessian(loss, z.flatten())
    rows, kind, weight = Reconstruction().as_known_loss(z)
    assert rows.shape == (1, 4)

    def fisher(samples):
        vectors = torch.cat([vector * weight for vector in fisher_vectors(rows, kind, samples)])
        return vectors.T @ vectors

    assert torch.allclose(fisher(None), hessian, atol=1e-12)
    assert torch.allclose(fisher(20_000), hessian, atol=0.01)


def test_evaluation_weighs_batches_by_their_terms():
    """Uneven batches: the mean over all samples, not over the batches."""
    from experiments.assembly import Learner, Site
    from kfac.communication import get_communicator

    model = build_model("autoencoder", input_shape=(1, 8, 8), hidden=(4,))
    data = load_data(DataSettings(name="digits", image_size=8), raw=True)
    learner = Learner(model, None, None, None, Reconstruction(), 0.0, 1)
    site = Site(torch.device("cpu"), get_communicator())
    everything = torch.arange(360)
    parts = learner.evaluate(data.test_batches([everything[:7], everything[7:]]), site)
    assert parts == pytest.approx(learner.evaluate(data.test_batches([everything]), site), rel=1e-5)


SMALL_TRANSFORMER = ("model.depth=1", "model.width=16", "model.heads=2")
RUNS = {
    "gpt": ("data=text", "data.context=16", *SMALL_TRANSFORMER, "model.tied=true", "schedule=sgd,spdkfac"),
    "vit": ("data=digits", "data.image_size=8", *SMALL_TRANSFORMER, "model.pooling=mean", "schedule=spdkfac"),
    "autoencoder": (
        "data=digits",
        "data.image_size=8",
        "model.hidden=[16,4]",
        "kfac.fisher=mc",
        "schedule=sgd,spdkfac",
    ),
}


@pytest.mark.parametrize(
    ("name", "metric"), [("gpt", "accuracy"), ("vit", "accuracy"), ("autoencoder", "squared_error")]
)
def test_models_train_and_the_record_says_how_well(command, tmp_path, name, metric):
    """They learn, and the recorded evaluation is that of the model that was saved."""
    lr = 0.1 if name == "vit" else 0.03
    common = ("tracking=none", "cluster=default", "iterations=30", f"optimizer.lr={lr}", "timeline.count=0")
    command("train", "-m", f"model={name}", *RUNS[name], *common)
    records = find_records(tmp_path)
    assert {record.head["schedule"] for record in records} == set(RUNS[name][-1].partition("=")[2].split(","))
    for record in records:
        rows, settings = record.rows(), record.read("config.json")
        assert all(metric in row for row in rows)
        assert {"accuracy", "squared_error"} & rows[-1].keys() == {metric}
        trained = [row["loss"] for row in rows if row["kind"] == "train"]
        assert sum(trained[-5:]) < 0.99 * sum(trained[:5])
        data = load_data(DataSettings(**settings["data"]), raw=name == "autoencoder")
        model = build_model(num_classes=data.num_classes, input_shape=data.input_shape, **settings["model"]).eval()
        model.load_state_dict(torch.load(record.path / "model.pt", weights_only=True))
        inputs, labels = next(iter(data.test_batches([torch.arange(data.test_size)])))
        with torch.no_grad():
            outputs = model(inputs)
        if name == "autoencoder":
            expected = F.binary_cross_entropy(outputs.sigmoid(), inputs, reduction="sum") / len(inputs)
        else:
            expected = F.cross_entropy(outputs, labels)
            assert rows[-1]["accuracy"] == pytest.approx((outputs.argmax(1) == labels).double().mean().item(), abs=1e-3)
        assert rows[-1]["loss"] == pytest.approx(expected.item(), rel=1e-4)
        assert record.read("summary.json")[f"eval_{metric}"] == rows[-1][metric]


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_curvature_of_a_text_counts_its_tokens(accumulation_steps):
    """G of the head is the mean over tokens of the outer products of their own losses' gradients."""
    from experiments.assembly import Learner
    from experiments.transformers import GPT
    from kfac import KFAC, KFACConfig
    from kfac.recording import Recorder

    model = GPT(7, 5, depth=1, width=8, heads=2).double()
    gradients = []
    model.head.register_forward_hook(lambda _, args, out: out.register_hook(gradients.append) and None)
    kfac = KFAC(model, KFACConfig(accumulation_steps=accumulation_steps))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    learner = Learner(model, optimizer, kfac, Recorder(), objective_of("gpt"), 0.0, accumulation_steps)
    text = torch.randint(0, 7, (4, 6))
    learner.step((text[:, :-1], text[:, 1:]), 0.1)
    tokens = 4 * 5
    own = torch.cat([g.flatten(0, 1) for g in gradients]) * tokens  # of the mean over all tokens, times their number
    assert len(own) == tokens
    # A sums over the positions of a sample, so G averages over them.
    torch.testing.assert_close(kfac.factor("head", "G"), own.T @ own / tokens / 5)


def test_objectives_of_models():
    assert isinstance(objective_of("resnet20"), Classification)
    assert isinstance(objective_of("autoencoder"), Reconstruction)


def test_a_summed_loss_takes_the_steps_of_the_mean_with_as_many_times_the_damping_and_the_clip():
    images, objective = torch.rand(16, 1, 3, 3), Reconstruction()
    terms = summed_terms("autoencoder", images.shape[1:])
    assert (terms, summed_terms("resnet20", images.shape[1:])) == (9, 1)

    def gradient(summed: bool, scale: float) -> torch.Tensor:
        torch.manual_seed(1)
        model = build_model("autoencoder", input_shape=(1, 3, 3), hidden=(4, 2))
        config = KFACConfig(lr=0.1, damping=1e-3 * scale, kl_clip=1e-5 * scale, fisher="exact")
        kfac = KFAC(model, config, "kfac")
        outputs = model(images)
        if summed:
            loss, known = objective.loss(outputs, images), objective.as_known_loss(outputs)
        else:
            loss = F.binary_cross_entropy_with_logits(outputs, images)
            known = (outputs.flatten(1), "binary", 1.0)
        with kfac.curvature(*known):
            loss.backward()
        kfac.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    mean = gradient(False, 1)
    torch.testing.assert_close(gradient(True, terms), mean, rtol=1e-4, atol=1e-6)
    # Negative control: with the same damping and clip the summed loss takes other, shorter steps.
    assert gradient(True, 1).norm() < 0.7 * mean.norm()
