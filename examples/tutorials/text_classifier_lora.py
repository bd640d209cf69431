# %% [markdown]
# # A fine-tuned text classifier (LoRA)
#
# With LoRA, the base network is frozen and the adapters have few parameters, so a posterior over
# the adapters is cheap for a network of any size. This notebook fine-tunes a tiny DistilBERT with
# random weights on made-up reviews, so that it downloads nothing. With your own model,
# `AutoModelForSequenceClassification.from_pretrained(...)` replaces the configuration.
#
# ## Reviews
#
# Each review either praises a film or pans it, and one label in ten is wrong. Later, we will show
# the model mixed reviews, which do not occur in the training data.

# %%
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

torch.manual_seed(0)
random.seed(0)

WORDS = {"blame": ["dull", "awful", "slow", "flat"], "praise": ["fun", "great", "warm", "sharp"]}
FILLERS = ["the", "film", "was", "and", "its", "plot", "very", "a", "bit"]
vocabulary = ["[PAD]", "[UNK]", *FILLERS, *WORDS["blame"], *WORDS["praise"]]
splitter = Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
)
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="[PAD]", unk_token="[UNK]")


def review(*moods):
    """Filler words, with one word of each mood among them."""
    words = random.choices(FILLERS, k=random.randint(4, 9))
    words += [random.choice(WORDS[mood]) for mood in moods]
    return " ".join(random.sample(words, len(words)))


def loader(reviews, shuffle=False):
    """Return a loader of batches of tokens and labels."""
    rows = [{**tokenizer(text), "labels": label} for text, label in reviews]
    return DataLoader(rows, 32, shuffle, collate_fn=DataCollatorWithPadding(tokenizer))


reviews = []
for number in range(800):
    label = number % 2
    text = review(("blame", "praise")[label])
    is_wrong = random.random() < 0.1
    reviews.append((text, 1 - label if is_wrong else label))
train = loader(reviews[:400], shuffle=True)
validation = loader(reviews[400:600])
test = loader(reviews[600:])
mixed = loader([(review("blame", "praise"), 0) for _ in range(200)])
print(reviews[0], reviews[1])

# %% [markdown]
# ## Fine-tune the adapters

# %%
from peft import LoraConfig, get_peft_model
from transformers import DistilBertConfig, DistilBertForSequenceClassification

config = DistilBertConfig(
    vocab_size=len(vocabulary), dim=32, hidden_dim=64, n_layers=2, n_heads=4, num_labels=2
)
lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["q_lin", "v_lin"])
model = get_peft_model(DistilBertForSequenceClassification(config), lora)
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
for _ in range(25):
    for batch in train:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
model = model.eval()
model.print_trainable_parameters()

# %% [markdown]
# ## A posterior over the adapters and the head
#
# You can pass the batches of Hugging Face's collators unchanged. Frozen parameters are never part
# of the posterior, so it covers the adapters and the classification head.
# `params=lambda name, parameter: "lora_" in name` would leave out the head.

# %%
from laplace_debias import Laplace

la = Laplace(model).fit(train)
ood = {"mixed": mixed}
network_report = la.evaluate(test, ood, method="map")
tuned = la.tune(validation)
posterior_report = la.evaluate(test, ood)
print(f"{len(la.mean):,} parameters; prior precision {tuned.prior_precision:.3g}")
for name in ("accuracy", "nll", "ece", "auroc_mixed"):
    print(
        f"{name:12} network {float(network_report[name]):.3f}, "
        f"posterior {float(posterior_report[name]):.3f}"
    )

# %% [markdown]
# ## Reviews with praise and blame
#
# The AUROC is the probability that a mixed review has a higher entropy than a clear one.

# %%
import matplotlib.pyplot as plt

figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for name, batches in {"clear reviews": test, "mixed reviews": mixed}.items():
    entropies = torch.cat([la.predict(batch).entropy() for batch in batches])
    ax.hist(entropies, torch.linspace(0, 0.7, 29), alpha=0.7, label=name)
ax.set(xlabel="entropy (nats); log 2 = 0.69 is a guess", ylabel="reviews")
ax.legend(frameon=False, loc="upper center")
plt.show()

# %% [markdown]
# ## Next steps
#
# - Fit a model trained with Hugging Face's Trainer:
#   [Hugging Face](../integrations/hugging-face.md).
# - Predict single tokens: [Use a language model](../how-to/language-models.md).
