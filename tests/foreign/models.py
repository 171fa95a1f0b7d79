"""Models of other libraries, made from tiny configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

__all__ = ["FOREIGN", "Foreign"]

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Foreign(NamedTuple):
    """A model with its arguments, and what is differentiated; None if it returns its loss."""

    model: nn.Module
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None = None


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def _tokens(*size: int) -> torch.Tensor:
    return torch.randint(3, 64, size)


def _causal(name: str, **options: Any) -> Callable[[], Foreign]:
    def make() -> Foreign:
        t = _transformers()
        config = getattr(t, f"{name}Config")(**_SMALL, **_SPECIAL, **options)
        model = getattr(t, f"{name}ForCausalLM")(config)
        ids = _tokens(2, 24)
        kwargs = {"input_ids": ids, "labels": ids, "use_cache": False, "output_hidden_states": True}
        return Foreign(model, kwargs)

    return make


def _mixtral() -> Foreign:
    return _causal("Mixtral", num_local_experts=4, output_router_logits=True)()


def _mamba() -> Foreign:
    t = _transformers()
    config = t.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=3)
    ids = _tokens(2, 12)
    return Foreign(t.MambaForCausalLM(config), {"input_ids": ids, "labels": ids})


def _t5() -> Foreign:
    t = _transformers()
    config = t.T5Config(
        num_layers=3, num_decoder_layers=3, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=64,
        decoder_start_token_id=0,
    )  # fmt: skip
    kwargs = {"input_ids": _tokens(2, 24), "labels": _tokens(2, 16), "output_hidden_states": True}
    return Foreign(t.T5ForConditionalGeneration(config), kwargs)


def _whisper() -> Foreign:
    t = _transformers()
    config = t.WhisperConfig(
        encoder_layers=3, decoder_layers=3, d_model=32, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64,
        num_mel_bins=20, max_source_positions=32, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    kwargs = {"input_features": torch.randn(2, 20, 64), "labels": _tokens(2, 16)}
    return Foreign(t.WhisperForConditionalGeneration(config), kwargs | {"use_cache": False})


def _clip() -> Foreign:
    t = _transformers()
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "max_position_embeddings": 24} | _SPECIAL  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
              "num_attention_heads": 4, "image_size": 32, "patch_size": 8}  # fmt: skip
    config = t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    kwargs = {"input_ids": _tokens(2, 16), "pixel_values": torch.randn(2, 3, 32, 32)}
    return Foreign(t.CLIPModel(config), kwargs | {"return_loss": True})


def _wav2vec2() -> Foreign:
    t = _transformers()
    config = t.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        mask_time_length=2, layerdrop=0.0,
    )  # fmt: skip
    kwargs = {"input_values": torch.randn(2, 1200), "labels": torch.randint(1, 32, (2, 6))}
    return Foreign(t.Wav2Vec2ForCTC(config), kwargs)


def _swin() -> Foreign:
    t = _transformers()
    config = t.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        num_labels=3,
    )  # fmt: skip
    kwargs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    return Foreign(t.SwinForImageClassification(config), kwargs)


def _vit_mae() -> Foreign:
    t = _transformers()
    config = t.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=8, decoder_hidden_size=32, decoder_num_hidden_layers=3,
        decoder_num_attention_heads=4, decoder_intermediate_size=64,
    )  # fmt: skip
    return Foreign(t.ViTMAEForPreTraining(config), {"pixel_values": torch.randn(2, 3, 32, 32)})


def _convnext() -> Foreign:
    t = _transformers()
    config = t.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 3], num_stages=2, num_labels=3)
    kwargs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    return Foreign(t.ConvNextForImageClassification(config), kwargs)


def _albert() -> Foreign:
    t = _transformers()
    config = t.AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    ids = _tokens(2, 24)
    return Foreign(t.AlbertForMaskedLM(config), {"input_ids": ids, "labels": ids})


def _gemma3() -> Foreign:
    t = _transformers()
    config = t.Gemma3TextConfig(**_SMALL, **_SPECIAL, head_dim=8, sliding_window=8)
    ids = _tokens(2, 24)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return Foreign(t.Gemma3ForCausalLM(config), kwargs)


def _detr() -> Foreign:
    t = _transformers()
    backbone = t.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    config = t.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=32, encoder_layers=3, decoder_layers=3,
        encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4,
        decoder_attention_heads=4, num_queries=6, num_labels=3,
    )  # fmt: skip
    model = t.DetrForObjectDetection(config)

    def loss(output: Any) -> torch.Tensor:
        return output.logits.square().mean() + output.pred_boxes.square().mean()

    return Foreign(model, {"pixel_values": torch.randn(2, 3, 48, 48)}, loss)


def _gpt2() -> Foreign:
    t = _transformers()
    config = t.GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, n_positions=64, **_SPECIAL)
    ids = _tokens(2, 24)
    return Foreign(t.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "use_cache": False})


def _timm(name: str, **options: Any) -> Callable[[], Foreign]:
    def make() -> Foreign:
        timm = pytest.importorskip("timm", reason="timm is not installed")
        model = timm.create_model(name, pretrained=False, num_classes=4, **options)
        return Foreign(model, {"x": torch.randn(2, 3, 64, 64)}, lambda y: y.square().mean())

    return make


def _unet2d() -> Foreign:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=2, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    kwargs = {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}
    return Foreign(model, kwargs, lambda output: output.sample.square().mean())


FOREIGN: dict[str, Callable[[], Foreign]] = {
    "Llama": _causal("Llama"),
    "Mixtral": _mixtral,
    "Qwen3-MoE": _causal("Qwen3Moe", num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=32, head_dim=8),
    "Gemma 2": _causal("Gemma2", head_dim=8),
    "Gemma 3": _gemma3,
    "ALBERT": _albert,
    "DETR": _detr,
    "GPT-2": _gpt2,
    "Mamba": _mamba,
    "T5": _t5,
    "Whisper": _whisper,
    "CLIP": _clip,
    "wav2vec2": _wav2vec2,
    "Swin": _swin,
    "ViT-MAE": _vit_mae,
    "ConvNeXt": _convnext,
    "ResNet (timm)": _timm("resnet18"),
    "ViT (timm)": _timm("vit_tiny_patch16_224", img_size=64, depth=4),
    "EfficientNet (timm)": _timm("efficientnet_b0"),
    "UNet2D (diffusers)": _unet2d,
}  # fmt: skip
