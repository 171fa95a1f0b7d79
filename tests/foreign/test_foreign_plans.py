"""Plans of models of other libraries, made from tiny configurations: nothing is downloaded.

Nobody tuned recoup to them: they are bit-equal, and nothing is left on them (F1, F2).
"""

from __future__ import annotations

import warnings
from functools import partial

import numpy
import pytest
import torch

import recoup
from tests.neighbours.planned import result_of
from tests.oracle import tensors
from tests.plan_oracle import allocated, assert_as_plain, between
from tests.planned_zoo import Case, of_transformers

pytestmark = [pytest.mark.foreign, pytest.mark.slow]
NUM_BUDGETS = 5

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_OF_THREE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip


def _text(length=24, **more):
    ids = torch.randint(3, 64, (2, length))
    return {"input_ids": ids, "labels": ids, **more}


def _pictures(*, size=32, **labels):
    return {"pixel_values": torch.randn(2, 3, size, size), **labels}


def _resnet():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model("resnet18", pretrained=False, num_classes=4)
    return Case(model, (), {"x": torch.randn(2, 3, 64, 64)}, lambda y: y.square().mean())


def _unet2d():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=2, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    kwargs = {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}
    return Case(model, (), kwargs, lambda output: output.sample.square().mean())


FOREIGN = {
    "Mixtral": of_transformers(
        "MixtralConfig", "MixtralForCausalLM",
        partial(_text, use_cache=False, output_hidden_states=True),
        **_SMALL, **_SPECIAL, num_local_experts=4, output_router_logits=True,
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
        "DetrConfig", "DetrForObjectDetection", partial(_pictures, size=48),
        loss=lambda output: output.logits.square().mean() + output.pred_boxes.square().mean(),
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
    "CLIP": of_transformers(
        "CLIPConfig", "CLIPModel",
        lambda: _pictures(input_ids=torch.randint(3, 64, (2, 16)), return_loss=True),
        projection_dim=16, vision_config=_OF_THREE | {"image_size": 32, "patch_size": 8},
        text_config=_OF_THREE | _SPECIAL | {"vocab_size": 64, "max_position_embeddings": 24},
    ),
    "wav2vec2": of_transformers(
        "Wav2Vec2Config", "Wav2Vec2ForCTC",
        lambda: {"input_values": torch.randn(2, 1200), "labels": torch.randint(1, 32, (2, 6))},
        vocab_size=32, conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        mask_time_length=2, layerdrop=0.0, **_OF_THREE,
    ),
    "ResNet (timm)": _resnet,
    "UNet2D (diffusers)": _unet2d,
}  # fmt: skip


@pytest.fixture(params=list(FOREIGN))
def foreign(request):
    torch.manual_seed(0)
    made = FOREIGN[request.param]()
    made.model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn about
        yield made


def num_hooks(model):
    return [
        {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks") and value}
        for module in model.modules()
    ]


def test_f1_f2_a_planned_step_is_the_plain_one(foreign):
    model = foreign.model

    def step():
        numpy.random.seed(1)  # the spans that wav2vec2 masks
        output = model(**foreign.kwargs)
        (output.loss if foreign.loss is None else foreign.loss(output)).backward()
        return [each.detach() for each in tensors(output)]

    hooks, given = num_hooks(model), [t.clone() for t in tensors(foreign.kwargs)]
    frontier = recoup.plan(model, loss=foreign.loss, **foreign.kwargs)
    assert num_hooks(model) == hooks
    plain, hooks = result_of(model, step), num_hooks(model)
    for k in range(NUM_BUDGETS):
        plan = frontier.plan(between(frontier, (k + 1) / (NUM_BUDGETS + 1)))
        assert num_hooks(model) == hooks
        assert_as_plain(plan, step, plain, peak=allocated)
    assert num_hooks(model) == hooks
    assert all(map(torch.equal, tensors(foreign.kwargs), given))
