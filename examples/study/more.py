"""Problems with other kinds of networks: text with LoRA, a timm network, CIFAR-10."""

import importlib
import os
import random
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from examples.paper import data as paper
from examples.paper.networks import all_cnn_c, wide_resnet
from examples.study.problems import Examples, MissingError, Problem, trained


def example(name: str) -> ModuleType:
    """Import another example, if the packages that it needs are installed."""
    try:
        return importlib.import_module(f"examples.{name}")
    except ImportError as error:
        raise MissingError(str(error)) from error


def given(variable: str) -> Path:
    """Return a path from an environment variable, if the variable is set."""
    if not os.environ.get(variable):
        raise MissingError(f"{variable} is not set")
    return Path(os.environ[variable])


def sets_of(test: Examples, shifted: Tensor, g: torch.Generator) -> dict[str, Examples]:
    """Return test images, shifted images, and images with randomly permuted 4 × 4 patches."""
    (x, y), size = test, test[0].shape[2] // 4
    patches = nn.functional.unfold(x, size, stride=size)
    order = torch.rand(len(x), 1, 16, generator=g).argsort(2).expand_as(patches)
    foreign = nn.functional.fold(patches.gather(2, order), x.shape[2:], size, stride=size)
    return {"test": test, "shifted": (shifted, y), "foreign": (foreign, y)}


def resnet(seed: int) -> Problem:
    """Train a small residual network on 2,000 images of CIFAR-10, reduced to 16 × 16 pixels."""
    pool, images = paper.cifar(10, given("LAPLACE_DEBIAS_DATA"))
    g = torch.Generator().manual_seed(seed)
    train, validation = torch.randperm(len(pool), generator=g)[:2200].split([2000, 200])
    test, at = images.subset(torch.randperm(len(images), generator=g)[:200]), torch.arange(200)

    def build() -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2), wide_resnet(10, 1, num_classes=10))

    network = trained(build, pool.batch(train), seed, 15)
    sets = sets_of(test.batch(at), test.corrupted(3).batch(at)[0], g)
    return Problem([network], pool.batch(train), pool.batch(validation), sets)


def all_cnn(seed: int) -> Problem:
    """Load the trained All-CNN-C; the seed selects the images for fit, tuning and evaluation."""
    pool, images = paper.cifar(10, given("LAPLACE_DEBIAS_DATA"))
    found, network = load_file(given("LAPLACE_DEBIAS_CHECKPOINT")), all_cnn_c()
    network.load_state_dict({key: found[key] for key in network.state_dict()})
    g = torch.Generator().manual_seed(seed)
    parts = [found[f"split.{part}"] for part in ("train", "val")]
    train, validation = (p[torch.randperm(len(p), generator=g)] for p in parts)
    # Every seed uses different test images.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, at = images.subset(order[40 * seed : 40 * (seed + 1)]), torch.arange(40)
    sets = sets_of(test.batch(at), test.corrupted(3).batch(at)[0], g)
    used = pool.batch(train[:256]), pool.batch(validation[:100])
    return Problem([network.eval()], *used, sets, len(train), "crossfit")


def timm_network(seed: int) -> Problem:
    """Train timm's smallest ResNet briefly on digits at 32 × 32 pixels."""
    drawn = example("timm_last_layer")
    g, (images, y) = torch.Generator().manual_seed(seed), drawn.drawn_digits().tensors
    order = torch.randperm(len(y), generator=g)[:550].split([300, 100, 150])
    train, validation, test = ((images[part].contiguous(), y[part]) for part in order)
    network = trained(
        lambda: drawn.timm.create_model("test_resnet", num_classes=10), train, seed, 8
    )
    noisy = test[0] + 0.2 * torch.randn(test[0].shape, generator=g)
    return Problem([network], train, validation, sets_of(test, noisy, g))


class Classifier(nn.Module):
    """A tiny DistilBERT with LoRA, in which only the adapters and the head are trained."""

    def __init__(self, parts: ModuleType, num_words: int) -> None:
        super().__init__()
        sizes = {"vocab_size": num_words, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
        config = parts.DistilBertConfig(**sizes, num_labels=2)
        modules = ["q_lin", "v_lin"]
        lora = parts.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=modules)
        network = parts.DistilBertForSequenceClassification(config)
        self.network = parts.get_peft_model(network, lora)

    def forward(self, words: Tensor) -> Tensor:
        """Compute logits `[B, 2]` from indices of words `[B, L]`, with 0 for padding."""
        return self.network(input_ids=words, attention_mask=(words > 0).long()).logits


def text(seed: int) -> Problem:
    """Make reviews that praise or blame, with one wrong label in ten; foreign reviews do both."""
    parts, moods, unknown = example("hugging_face_lora"), ("blame", "praise"), 1
    random.seed(seed)
    g = torch.Generator().manual_seed(seed)
    words = [*parts.FILLERS, *parts.WORDS["blame"], *parts.WORDS["praise"]]
    numbers = {word: number for number, word in enumerate(words, unknown + 1)}

    def review(*of: str) -> list[int]:
        found = [numbers[word] for word in parts.review(*of).split()]
        return found + [0] * (11 - len(found))

    def reviews(number: int) -> Examples:
        labels, wrong = torch.arange(number) % 2, torch.rand(number, generator=g) < 0.1
        x = torch.tensor([review(moods[label]) for label in labels.tolist()])
        return x, torch.where(wrong, 1 - labels, labels)

    train, validation, test = reviews(256), reviews(128), reviews(400)
    network = trained(lambda: Classifier(parts, len(words) + 2), train, seed, 60, 1e-2)
    # A third of the words is replaced by an unknown word.
    lost = (torch.rand(test[0].shape, generator=g) < 1 / 3) & (test[0] > 0)
    foreign = torch.tensor([review(*moods) for _ in range(400)]), test[1]
    shifted = test[0].masked_fill(lost, unknown), test[1]
    sets = {"test": test, "shifted": shifted, "foreign": foreign}
    return Problem([network], train, validation, sets)


MORE = {"text-lora": text, "timm": timm_network, "resnet": resnet, "all-cnn-c": all_cnn}
"""The functions that make the problem of a seed, by name."""
