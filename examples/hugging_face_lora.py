"""A Hugging Face classifier with LoRA: a posterior over the adapters; all else is frozen.

A tiny DistilBERT with random weights reads made-up reviews. It should be uncertain about reviews
that both praise and blame, because no training review does both. With your own model,
`from_pretrained` replaces the configuration. Needs `pip install transformers peft`.

Run with `python examples/hugging_face_lora.py`; it takes seconds and downloads nothing.
"""

import argparse
import random
from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from laplace_debias import Laplace

WORDS = {"blame": ["dull", "awful", "slow", "flat"], "praise": ["fun", "great", "warm", "sharp"]}
FILLERS = ["the", "film", "was", "and", "its", "plot", "very", "a", "bit"]


def review(*moods: str) -> str:
    """Return filler words in random order, with one word of each mood among them."""
    words = random.choices(FILLERS, k=random.randint(4, 9)) + [
        random.choice(WORDS[mood]) for mood in moods
    ]
    return " ".join(random.sample(words, len(words)))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Fine-tune adapters, fit and tune a posterior over them; return the printed numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=25, help="epochs of fine-tuning")
    parser.add_argument("--seed", type=int, default=0, help="seed of the reviews and the network")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    random.seed(options.seed)

    words = ["[PAD]", "[UNK]", *FILLERS, *WORDS["blame"], *WORDS["praise"]]
    vocabulary = {word: index for index, word in enumerate(words)}
    splitter = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    splitter.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="[PAD]", unk_token="[UNK]"
    )

    def loader(reviews: list[tuple[str, int]], shuffle: bool = False) -> DataLoader:
        rows = [{**tokenizer(text), "labels": label} for text, label in reviews]
        return DataLoader(rows, 32, shuffle, collate_fn=DataCollatorWithPadding(tokenizer))

    # One label in ten is wrong, to imitate the mistakes of human annotators.
    labelled = []
    for number in range(800):
        label = number % 2
        text = review(("blame", "praise")[label])
        is_wrong = random.random() < 0.1
        labelled.append((text, 1 - label if is_wrong else label))
    train = loader(labelled[:400], shuffle=True)
    val = loader(labelled[400:600])
    test = loader(labelled[600:])
    mixed = loader([(review("blame", "praise"), 0) for _ in range(200)])

    config = DistilBertConfig(
        vocab_size=len(words), dim=32, hidden_dim=64, n_layers=2, n_heads=4, num_labels=2
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["q_lin", "v_lin"])
    model = get_peft_model(DistilBertForSequenceClassification(config), lora)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    for _ in range(options.epochs):
        for batch in train:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.eval()

    # The head was also trained, but the posterior should be only over the adapters. Without
    # `params`, the posterior is over all parameters that are not frozen.
    la = Laplace(model, params=lambda name, _: "lora_" in name).fit(train)
    results = {}

    def measure(name: str, method: str) -> None:
        nll = float(la.evaluate(test, method=method)["nll"])
        entropies = {}
        for kind, reviews in (("clear", test), ("mixed", mixed)):
            batch_entropies = [la.predict(batch, method).entropy() for batch in reviews]
            entropies[kind] = float(torch.cat(batch_entropies).mean())
            results[f"{name} {kind}"] = entropies[kind]
        results[f"{name} nll"] = nll
        print(
            f"{name}: NLL {nll:.3f} on new reviews; mean entropy {entropies['clear']:.3f} nats of "
            f"these, {entropies['mixed']:.3f} of reviews with praise and blame"
        )

    measure("network", "map")
    tuned = la.tune(val)
    print(
        f"posterior over {len(la.mean):,} entries of the adapters, of {model.num_parameters():,} "
        f"parameters; prior precision {tuned.prior_precision:.3g}"
    )
    measure("Laplace", "glm")
    return results


if __name__ == "__main__":
    main()
