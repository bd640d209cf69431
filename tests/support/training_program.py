"""Training runs with a callback, one after the other, in as many processes as torchrun starts.

Its arguments are LIBRARY FOLDER MODE SAMPLER...: the mode of the fits, and the sampler of each run.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

SIZE = 37  # neither two processes nor batches divide it


def examples(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] + torch.randn(n, 3, generator=generator)).argmax(1))


SAMPLERS = {
    "all": lambda: RandomSampler(range(SIZE)),
    "in order": lambda: SequentialSampler(range(SIZE)),
    "first": lambda: SubsetRandomSampler(range(20)),
    # Every draw is the same example, so the posterior is the same for all draws.
    "weighted": lambda: WeightedRandomSampler(torch.eye(SIZE)[3], 20),
}


class TextModel(nn.Module):
    """A classifier with the signature that Hugging Face's Trainer expects."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_lightning(folder, is_logged_by_wandb=False, sampler="all", mode="full"):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger, WandbLogger

    from laplace_debias.integrations.lightning import LaplaceCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = TextModel().layers

        def forward(self, x):
            return self.inner(x)

        def training_step(self, batch, _):
            # The weights stay, so that runs of one and of several processes end with the same.
            return 0 * nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("score", 0.0, sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    callback = LaplaceCallback(curvature="kfac", mode=mode)
    logger = CSVLogger(folder)
    if is_logged_by_wandb:
        logger = WandbLogger(offline=True, save_dir=folder)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="auto" if is_logged_by_wandb else "ddp",
        default_root_dir=folder,
        callbacks=[callback],
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Module(),
        DataLoader(examples(SIZE, 1), batch_size=5, sampler=SAMPLERS[sampler]()),
        DataLoader(examples(SIZE, 2), batch_size=5),
    )
    return callback.laplace


def with_transformers(folder, is_logged_by_wandb=False, sampler="all", mode="full"):
    import transformers

    from laplace_debias.integrations.transformers import LaplaceCallback

    sets = [
        [{"x": x, "labels": y} for x, y in zip(*examples(SIZE, seed).tensors, strict=True)]
        for seed in (1, 2)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=5,
        per_device_eval_batch_size=5,
        learning_rate=0.0,
        report_to="wandb" if is_logged_by_wandb else "none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="epoch",
    )

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *arguments):
            return SAMPLERS[sampler]()

    trainer = Trainer(
        model=TextModel(), args=arguments, train_dataset=sets[0], eval_dataset=sets[1]
    )
    callback = LaplaceCallback(trainer, curvature="kfac", mode=mode)
    trainer.add_callback(callback)
    trainer.train()
    return callback.laplace


if __name__ == "__main__":
    library, root, mode, *samplers = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    written = []

    def notice(event, arguments):
        if event == "os.rename":
            written.append(Path(os.fsdecode(arguments[1])).name)

    sys.addaudithook(notice)
    train = {"lightning": with_lightning, "transformers": with_transformers}[library]
    for sampler in samplers:
        written.clear()
        folder = Path(root, sampler)
        la = train(folder, sampler=sampler, mode=mode)
        numbers = {
            "num_data": la.num_data,
            "written": [name for name in written if name.endswith("posterior.safetensors")],
            "prior_precision": float(la.prior_precision),
            "precision": la.posterior.precision.to_dense().double().tolist(),
        }
        Path(folder, f"numbers-{os.environ['RANK']}.json").write_text(json.dumps(numbers))
