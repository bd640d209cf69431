"""Reduced classifiers and language models of Hugging Face, and one with LoRA from PEFT."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import transformers
from torch import nn

from benchmarks.architectures.architecture import (
    CLASSES,
    END,
    LENGTH,
    PAD,
    VOCABULARY,
    Architecture,
    images,
    language,
    sentences,
)

_IDS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": END}
_WIDTH = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_TEXT = {**_IDS, **_WIDTH, "max_position_embeddings": 2 * LENGTH, "num_labels": CLASSES}
_BERT = {**_TEXT, "type_vocab_size": 2}
_LLAMA = {**_TEXT, "num_key_value_heads": 1}
_GPT2 = {
    **_IDS,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": LENGTH,
    "num_labels": CLASSES,
}
_DISTILBERT = {
    **_IDS,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": LENGTH,
    "num_labels": CLASSES,
}
_T5 = {
    **_IDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": PAD,
    "num_labels": CLASSES,
}
_OPT = {
    **_IDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 24,
    "max_position_embeddings": 2 * LENGTH,
    "word_embed_proj_dim": 16,
    "num_labels": CLASSES,
}
_BLOOM = {**_IDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "num_labels": CLASSES}
_XLNET = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "d_model": 16,
    "n_layer": 2,
    "n_head": 2,
    "d_inner": 24,
    "num_labels": CLASSES,
}
_BART = {
    **_IDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 2 * LENGTH,
    "decoder_start_token_id": END,
    "num_labels": CLASSES,
}
_VIT = {**_WIDTH, "image_size": 16, "patch_size": 4, "num_labels": CLASSES}
# The class of the network; the class of the configuration, and its options.
_TEXT_CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("BertConfig", _BERT),
    "DistilBertForSequenceClassification": ("DistilBertConfig", _DISTILBERT),
    "RobertaForSequenceClassification": ("RobertaConfig", _BERT),
    "AlbertForSequenceClassification": ("AlbertConfig", {**_BERT, "embedding_size": 8}),
    "ElectraForSequenceClassification": ("ElectraConfig", {**_BERT, "embedding_size": 8}),
    "DebertaV2ForSequenceClassification": (
        "DebertaV2Config",
        {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "GPT2ForSequenceClassification": ("GPT2Config", _GPT2),
    "LlamaForSequenceClassification": ("LlamaConfig", _LLAMA),
    "Qwen2ForSequenceClassification": ("Qwen2Config", _LLAMA),
    "Qwen3ForSequenceClassification": ("Qwen3Config", {**_LLAMA, "head_dim": 8}),
    "MistralForSequenceClassification": ("MistralConfig", _LLAMA),
    "GemmaForSequenceClassification": ("GemmaConfig", {**_LLAMA, "head_dim": 8}),
    "ModernBertForSequenceClassification": (
        "ModernBertConfig",
        {**_TEXT, "cls_token_id": END, "sep_token_id": END},
    ),
    "T5ForSequenceClassification": ("T5Config", _T5),
    "Gemma3TextForSequenceClassification": ("Gemma3TextConfig", {**_LLAMA, "head_dim": 8}),
    "Phi3ForSequenceClassification": ("Phi3Config", _LLAMA),
    "OPTForSequenceClassification": ("OPTConfig", _OPT),
    "BloomForSequenceClassification": ("BloomConfig", _BLOOM),
    "XLNetForSequenceClassification": ("XLNetConfig", _XLNET),
    "BartForSequenceClassification": ("BartConfig", _BART),
}
# The name in the table; the classes of the network and of the configuration, and its options.
_LANGUAGE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT2LMHeadModel, tied": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "LlamaForCausalLM": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "LlamaForCausalLM, tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_LLAMA, "tie_word_embeddings": True},
    ),
    "Qwen2ForCausalLM, tied": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_LLAMA, "tie_word_embeddings": True},
    ),
    "BertForMaskedLM, tied": ("BertForMaskedLM", "BertConfig", _BERT),
}
# The class of the network; the class of the configuration, its options, and the side of images.
_IMAGE_CLASSIFIERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ViTForImageClassification": ("ViTConfig", _VIT, 16),
    "Dinov2ForImageClassification": ("Dinov2Config", _VIT, 16),
    "SwinForImageClassification": (
        "SwinConfig",
        {
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "image_size": 32,
            "patch_size": 2,
            "window_size": 4,
            "num_labels": CLASSES,
        },
        32,
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": CLASSES},
        32,
    ),
    "BeitForImageClassification": ("BeitConfig", _VIT, 16),
    "CLIPForImageClassification": (
        "CLIPConfig",
        {
            "text_config": {**_WIDTH, **_IDS},
            "vision_config": _VIT,
            "num_labels": CLASSES,
        },
        16,
    ),
    "SegformerForImageClassification": (
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "num_labels": CLASSES,
        },
        32,
    ),
}


def architectures() -> list[Architecture]:
    """Return the networks, reduced by their configurations."""
    networks = []
    for name, (config, options) in _TEXT_CLASSIFIERS.items():
        build = partial(_build, name, config, options)
        networks.append(Architecture(name, "transformers", build, sentences))
    for name, (model, config, options) in _LANGUAGE_MODELS.items():
        build = partial(_build, model, config, options)
        networks.append(Architecture(name, "transformers", build, language))
    for name, (config, options, side) in _IMAGE_CLASSIFIERS.items():
        build = partial(_build, name, config, options)
        networks.append(Architecture(name, "transformers", build, images(side)))
    if find_spec("peft") is not None:
        name = "LlamaForSequenceClassification, LoRA"
        networks.append(Architecture(name, "peft", _build_lora, sentences))
    return networks


def _build(model: str, config: str, options: dict[str, Any]) -> nn.Module:
    """Build a network by the names of its class and of the class of its configuration."""
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def _build_lora() -> nn.Module:
    import peft

    model = _build("LlamaForSequenceClassification", "LlamaConfig", _LLAMA)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["score"]
    )
    return peft.get_peft_model(model, config)
