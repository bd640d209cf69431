"""Problems with deeper networks: text with LoRA, a timm network, CIFAR-10."""

import importlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from examples.paper import data as paper
from examples.paper.networks import all_cnn_c, wide_resnet
from examples.study.problems import Examples, MissingError, Problem, train_network

PADDING = 0
UNKNOWN_WORD = 1
MAX_WORDS = 11  # nine filler words, and a word of each mood


def import_example(name: str) -> ModuleType:
    """Import another example, if the packages that it needs are installed."""
    try:
        return importlib.import_module(f"examples.{name}")
    except ImportError as error:
        raise MissingError(str(error)) from error


def path_from_environment(variable: str) -> Path:
    """Return a path from an environment variable, if the variable is set."""
    if not os.environ.get(variable):
        raise MissingError(f"{variable} is not set")
    return Path(os.environ[variable])


def permute_patches(images: Tensor, g: torch.Generator) -> Tensor:
    """Cut each image `[C, H, W]` of a batch into 4 × 4 patches, and permute them at random."""
    size = images.shape[2] // 4
    patches = nn.functional.unfold(images, size, stride=size)
    order = torch.rand(len(images), 1, 16, generator=g).argsort(2).expand_as(patches)
    return nn.functional.fold(patches.gather(2, order), images.shape[2:], size, stride=size)


def as_examples(images: paper.Images) -> Examples:
    """Return all images of a data set as one batch, with their labels."""
    return images.batch(torch.arange(len(images)))


def resnet_problem(seed: int) -> Problem:
    """Train a small residual network on 2,000 images of CIFAR-10, reduced to 16 × 16 pixels."""
    pool, test_images = paper.cifar(10, path_from_environment("LAPLACE_DEBIAS_DATA"))
    g = torch.Generator().manual_seed(seed)
    pool_indices = torch.randperm(len(pool), generator=g)[:2200]
    train, validation = (pool.batch(indices) for indices in pool_indices.split([2000, 200]))
    test_images = test_images.subset(torch.randperm(len(test_images), generator=g)[:200])
    test = as_examples(test_images)

    def build() -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2), wide_resnet(10, 1, num_classes=10))

    return Problem(
        networks=[train_network(build, train, seed, epochs=15)],
        train=train,
        validation=validation,
        test=test,
        shifted=as_examples(test_images.corrupted(3)),
        foreign=permute_patches(test[0], g),
    )


def all_cnn_problem(seed: int) -> Problem:
    """Load the trained All-CNN-C; the seed selects the images for fit, tuning and evaluation."""
    pool, test_images = paper.cifar(10, path_from_environment("LAPLACE_DEBIAS_DATA"))
    checkpoint = load_file(path_from_environment("LAPLACE_DEBIAS_CHECKPOINT"))
    network = all_cnn_c().eval()
    network.load_state_dict({name: checkpoint[name] for name in network.state_dict()})
    g = torch.Generator().manual_seed(seed)
    train_indices = checkpoint["split.train"]
    num_data = len(train_indices)
    train_indices = train_indices[torch.randperm(num_data, generator=g)]
    validation_indices = checkpoint["split.val"]
    validation_indices = validation_indices[torch.randperm(len(validation_indices), generator=g)]
    # Every seed uses different test images.
    order = torch.randperm(len(test_images), generator=torch.Generator().manual_seed(0))
    test_images = test_images.subset(order[40 * seed : 40 * (seed + 1)])
    test = as_examples(test_images)
    return Problem(
        networks=[network],
        train=pool.batch(train_indices[:256]),
        validation=pool.batch(validation_indices[:100]),
        test=test,
        shifted=as_examples(test_images.corrupted(3)),
        foreign=permute_patches(test[0], g),
        num_data=num_data,
        mode="crossfit",
    )


def timm_problem(seed: int) -> Problem:
    """Train timm's smallest ResNet briefly on digits at 32 × 32 pixels."""
    timm_example = import_example("timm_last_layer")
    images, labels = timm_example.drawn_digits().tensors
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=g)[:550]
    train, validation, test = (
        (images[indices].contiguous(), labels[indices]) for indices in order.split([300, 100, 150])
    )

    def build() -> nn.Module:
        return timm_example.timm.create_model("test_resnet", num_classes=10)

    network = train_network(build, train, seed, epochs=8)
    x_test, y_test = test
    noisy = x_test + 0.2 * torch.randn(x_test.shape, generator=g)
    foreign = permute_patches(x_test, g)
    return Problem([network], train, validation, test, shifted=(noisy, y_test), foreign=foreign)


class Classifier(nn.Module):
    """A tiny DistilBERT with LoRA, in which only the adapters and the head are trained.

    Args:
        lora_example: The example `hugging_face_lora`, which imports transformers and peft.
        vocabulary_size: The number of word indices, including padding and the unknown word.
    """

    def __init__(self, lora_example: ModuleType, vocabulary_size: int) -> None:
        super().__init__()
        config = lora_example.DistilBertConfig(
            vocab_size=vocabulary_size, dim=32, hidden_dim=64, n_layers=2, n_heads=4, num_labels=2
        )
        lora = lora_example.LoraConfig(
            task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["q_lin", "v_lin"]
        )
        network = lora_example.DistilBertForSequenceClassification(config)
        self.network = lora_example.get_peft_model(network, lora)

    def forward(self, words: Tensor) -> Tensor:
        """Compute logits `[B, 2]` from word indices `[B, L]`."""
        return self.network(input_ids=words, attention_mask=(words != PADDING).long()).logits


def text_problem(seed: int) -> Problem:
    """Make reviews that praise or blame, with one wrong label in ten; foreign reviews do both."""
    lora_example = import_example("hugging_face_lora")
    random.seed(seed)  # the example draws the words of a review with `random`
    g = torch.Generator().manual_seed(seed)
    moods = ("blame", "praise")
    words = [*lora_example.FILLERS, *lora_example.WORDS["blame"], *lora_example.WORDS["praise"]]
    word_indices = {word: index for index, word in enumerate(words, start=UNKNOWN_WORD + 1)}

    def review(*moods: str) -> list[int]:
        indices = [word_indices[word] for word in lora_example.review(*moods).split()]
        return indices + [PADDING] * (MAX_WORDS - len(indices))

    def labelled_reviews(number: int) -> Examples:
        labels = torch.arange(number) % 2
        is_wrong = torch.rand(number, generator=g) < 0.1
        x = torch.tensor([review(moods[label]) for label in labels.tolist()])
        return x, torch.where(is_wrong, 1 - labels, labels)

    def build() -> nn.Module:
        return Classifier(lora_example, vocabulary_size=len(words) + 2)

    train = labelled_reviews(256)
    validation = labelled_reviews(128)
    test = labelled_reviews(400)
    network = train_network(build, train, seed, epochs=60, max_learning_rate=1e-2)
    # A third of the words is replaced by the unknown word.
    x_test, y_test = test
    is_replaced = (torch.rand(x_test.shape, generator=g) < 1 / 3) & (x_test != PADDING)
    shifted = (x_test.masked_fill(is_replaced, UNKNOWN_WORD), y_test)
    foreign = torch.tensor([review(*moods) for _ in range(400)])
    return Problem([network], train, validation, test, shifted, foreign)


DEEP_PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "text-lora": text_problem,
    "timm": timm_problem,
    "resnet": resnet_problem,
    "all-cnn-c": all_cnn_problem,
}
"""For each problem, the function that makes it from a seed."""
