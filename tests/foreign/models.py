"""Models of other libraries, made from tiny configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.planned_zoo import MODELS, Case, of_transformers

__all__ = ["FOREIGN"]

Maker = Callable[[], Case]

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_OF_THREE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
_OF_IMAGES = _OF_THREE | {"image_size": 32, "patch_size": 8}


def _text(length: int = 24, **more: Any) -> dict[str, Any]:
    ids = torch.randint(3, 64, (2, length))
    return {"input_ids": ids, "labels": ids, **more}


def _pictures(*, size: int = 32, **labels: torch.Tensor) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size), **labels}


_labelled = partial(_pictures, labels=torch.tensor([0, 2]))


def _causal(name: str, **options: Any) -> Maker:
    inputs = partial(_text, use_cache=False, output_hidden_states=True)
    sizes = _SMALL | _SPECIAL | options
    return of_transformers(f"{name}Config", f"{name}ForCausalLM", inputs, **sizes)


def _clip() -> dict[str, Any]:
    text = {"input_ids": torch.randint(3, 64, (2, 16))}
    return text | _pictures() | {"return_loss": True}


def _found_objects(output: Any) -> torch.Tensor:
    return output.logits.square().mean() + output.pred_boxes.square().mean()


def _timm(name: str, **options: Any) -> Maker:
    def make() -> Case:
        timm = pytest.importorskip("timm", reason="timm is not installed")
        model = timm.create_model(name, pretrained=False, num_classes=4, **options)
        return Case(model, (), {"x": torch.randn(2, 3, 64, 64)}, lambda y: y.square().mean())

    return make


def _unet2d() -> Case:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=2, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    kwargs = {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}
    return Case(model, (), kwargs, lambda output: output.sample.square().mean())


FOREIGN: dict[str, Maker] = {
    "Llama": _causal("Llama"),
    "Mixtral": _causal("Mixtral", num_local_experts=4, output_router_logits=True),
    "Qwen3-MoE": _causal(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8
    ),
    "Gemma 3": of_transformers(
        "Gemma3TextConfig", "Gemma3ForCausalLM", partial(_text, use_cache=False),
        **_SMALL, **_SPECIAL, head_dim=8, sliding_window=8,
    ),
    "ALBERT": of_transformers(
        "AlbertConfig", "AlbertForMaskedLM", _text, vocab_size=64, embedding_size=16,
        max_position_embeddings=64, **_OF_THREE | {"num_hidden_layers": 4},
    ),
    "DETR": of_transformers(
        "DetrConfig", "DetrForObjectDetection", partial(_pictures, size=48), loss=_found_objects,
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config={
            "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
            "layer_type": "basic", "out_features": ["stage2"],
        },
        d_model=32, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, num_queries=6, num_labels=3,
    ),
    "Mamba": of_transformers(
        "MambaConfig", "MambaForCausalLM", partial(_text, 12), vocab_size=64, hidden_size=32,
        state_size=4, num_hidden_layers=3,
    ),
    "T5": MODELS["t5"],
    "CLIP": of_transformers(
        "CLIPConfig", "CLIPModel", _clip, projection_dim=16, vision_config=_OF_IMAGES,
        text_config=_OF_THREE | _SPECIAL | {"vocab_size": 64, "max_position_embeddings": 24},
    ),
    "wav2vec2": of_transformers(
        "Wav2Vec2Config", "Wav2Vec2ForCTC",
        lambda: {"input_values": torch.randn(2, 1200), "labels": torch.randint(1, 32, (2, 6))},
        vocab_size=32, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        mask_time_length=2, layerdrop=0.0, **_OF_THREE,
    ),
    "Swin": of_transformers(
        "SwinConfig", "SwinForImageClassification", _labelled, image_size=32, patch_size=4,
        embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=3,
    ),
    "ConvNeXt": of_transformers(
        "ConvNextConfig", "ConvNextForImageClassification", _labelled, hidden_sizes=[8, 16],
        depths=[2, 3], num_stages=2, num_labels=3,
    ),
    "ResNet (timm)": _timm("resnet18"),
    "EfficientNet (timm)": _timm("efficientnet_b0"),
    "UNet2D (diffusers)": _unet2d,
}  # fmt: skip
