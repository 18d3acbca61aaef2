"""Models of transformers and peft, of a few thousand parameters, with ragged samples padded per batch."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.campaigns.zoo.entry import Entry

__all__ = ["ENTRIES"]

WORDS, PAD, IGNORED = 48, 0, -100
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def ragged(length: int = 24, shortest: int = 2) -> list[dict[str, Tensor]]:
    """Token sequences of 2 to 11 words, with labels."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(length):
        words = torch.randint(3, WORDS, (shortest + (number * 7) % 10,), generator=generator)
        found.append({"input_ids": words, "labels": words.clone()})
    return found


def masked_words() -> list[dict[str, Tensor]]:
    """As `ragged`, with labels at every third word only."""
    samples = ragged(shortest=3)
    for sample in samples:
        sample["labels"][torch.arange(len(sample["labels"])) % 3 != 0] = IGNORED
    return samples


def pairs() -> list[dict[str, Tensor]]:
    """Source and target sequences of other lengths."""
    return [
        {"input_ids": a["input_ids"], "labels": b["labels"]}
        for a, b in zip(ragged(), reversed(ragged()), strict=True)
    ]


def with_classes() -> list[dict[str, Any]]:
    return [{"input_ids": s["input_ids"], "labels": number % 3} for number, s in enumerate(ragged())]


def images() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": number % 3}
        for number in range(24)
    ]


def speech() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_features": torch.randn(8, 32, generator=generator), "labels": sample["labels"]}
        for sample in ragged()
    ]


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad words and labels to the longest sample of the batch, as the library's collators do."""
    batch: dict[str, Tensor] = {}
    for name in samples[0]:
        parts = [torch.as_tensor(sample[name]) for sample in samples]
        if parts[0].dim() == 1:
            filler = IGNORED if name == "labels" else PAD
            batch[name] = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=filler)
        else:
            batch[name] = torch.stack(parts)
    if "input_ids" in batch:
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return batch


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def _llama_config() -> Any:
    return hf.LlamaConfig(**_SIZES, num_key_value_heads=1, vocab_size=WORDS, max_position_embeddings=16)


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(_llama_config())


def llama_recomputed() -> nn.Module:
    """Activations are computed again in backward."""
    model = llama()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(**_SIZES, **_NO_DROPOUT, vocab_size=WORDS, max_position_embeddings=16)
    )


def bert_classifier() -> nn.Module:
    config = hf.BertConfig(
        **_SIZES, **_NO_DROPOUT, vocab_size=WORDS, max_position_embeddings=16, num_labels=3,
        classifier_dropout=0.0,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=WORDS, dropout_rate=0.0,
        decoder_start_token_id=PAD, pad_token_id=PAD,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(**_SIZES, **_NO_DROPOUT, image_size=8, patch_size=4, num_labels=3)
    return hf.ViTForImageClassification(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=WORDS,
        num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=PAD,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **_SIZES, num_key_value_heads=1, vocab_size=WORDS, max_position_embeddings=16,
        num_local_experts=4, num_experts_per_tok=1, sliding_window=None,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(llama(), config)


ENTRIES = {
    "GPT-2": Entry("transformers", gpt2, ragged, pad),
    "Llama": Entry("transformers", llama, ragged, pad),
    "Llama, gradient checkpointing": Entry("transformers", llama_recomputed, ragged, pad),
    "BERT, masked words": Entry("transformers", bert, masked_words, pad),
    "BERT, classes": Entry("transformers", bert_classifier, with_classes, pad),
    "T5": Entry("transformers", t5, pairs, pad),
    "ViT": Entry("transformers", vit, images, pad),
    "Whisper": Entry("transformers", whisper, speech, pad),
    "Mixtral": Entry("transformers", mixtral, ragged, pad),
    "Llama with LoRA": Entry("peft", lora, ragged, pad),
}
