"""Your own training script: a timm network on a folder of images, two epochs, one checkpoint.

The script does not import laplace-debias. The last line of its output is the command that evaluates
whether the network's probabilities can be trusted. `--make-data` writes data to try the script:
scikit-learn's digits as `train/`, `val/` and `test/` with a folder for each class, and textures
that show no digits.

Run with `python examples/train_timm_on_a_folder.py --make-data`; it downloads nothing.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from timm.data import create_dataset, create_transform, resolve_data_config
from torch import nn
from torch.utils.data import DataLoader


def make_data(data: Path, ood: Path, train: int, seed: int) -> None:
    """Write digits by split and class, and stripes of random angle and width, as PNG files."""
    random = np.random.default_rng(seed)
    pixels, digits = load_digits(return_X_y=True)
    order = random.permutation(len(digits))[: train + 450]
    for number, (image, digit) in enumerate(zip(pixels[order], digits[order], strict=True)):
        if number < train:
            split = "train"
        elif number < train + 150:
            split = "val"
        else:
            split = "test"
        folder = data / split / f"digit_{digit}"
        folder.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray((image.reshape(8, 8) * 255 / 16).astype(np.uint8))
        small.resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{number:04d}.png")
    rows, columns = np.mgrid[:32, :32]
    (ood / "stripes").mkdir(parents=True, exist_ok=True)
    for number in range(150):
        angle, width, phase = random.uniform([0, 1, 0], [np.pi, 4, 6])
        wave = np.sin((rows * np.sin(angle) + columns * np.cos(angle)) / width + phase)
        stripes = Image.fromarray((127.5 * (1 + wave)).astype(np.uint8))
        stripes.save(ood / "stripes" / f"{number:04d}.png")


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Train and save; return the command that evaluates the network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("results/folder/digits"))
    parser.add_argument("--ood", type=Path, default=Path("results/folder/textures"))
    parser.add_argument("--checkpoint", type=Path, default=Path("results/folder/net.safetensors"))
    parser.add_argument("--make-data", action="store_true", help="write both folders first")
    parser.add_argument("--train", type=int, default=600, help="training images to write")
    parser.add_argument("--timm", default="test_efficientnet", help="name of a timm architecture")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and the network")
    options = parser.parse_args(arguments)
    if options.make_data:
        make_data(options.data, options.ood, options.train, options.seed)
    if not (options.data / "train").is_dir():
        parser.error(f"there is no {options.data}/train: pass --data DIR, or --make-data")

    torch.manual_seed(options.seed)
    num_classes = sum(path.is_dir() for path in (options.data / "train").iterdir())
    model = timm.create_model(options.timm, num_classes=num_classes)
    # This is timm's transform for the architecture's input size; the report also uses it.
    transform = create_transform(**resolve_data_config({}, model=model))
    train, val = (
        create_dataset("", str(options.data), split=split, transform=transform)
        for split in ("train", "val")
    )
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for epoch in range(options.epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            hits = [model(x).argmax(1) == y for x, y in DataLoader(val, batch_size=64)]
        print(f"epoch {epoch + 1}: validation accuracy {torch.cat(hits).float().mean():.3f}")

    options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), options.checkpoint)
    command = ["laplace-debias", "report", "--timm", options.timm]
    command += ["--checkpoint", str(options.checkpoint), "--data", str(options.data)]
    if options.ood.is_dir():
        command += ["--ood", f"{options.ood.name}={options.ood}"]
    command += ["--output", str(options.checkpoint.with_name("report"))]
    print("Can you trust its probabilities? This command evaluates them:")
    print(shlex.join(command))
    return command


if __name__ == "__main__":
    main()
