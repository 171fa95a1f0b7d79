"""The models that plans are made for: a GPT-2, Llamas, a ViT and a ResNet-50, sized down."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Case:
    """A model in training mode, its arguments, and the loss of its output.

    `owner.<name>` is the list of its repeating blocks, which the model calls one after another: a
    contestant puts other modules there.
    """

    model: nn.Module
    kwargs: dict
    loss: Callable
    owner: nn.Module
    name: str

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def blocks(self) -> list[nn.Module]:
        return list(getattr(self.owner, self.name))

    @blocks.setter
    def blocks(self, blocks: list[nn.Module]) -> None:
        setattr(self.owner, self.name, nn.ModuleList(blocks))

    def forward(self) -> torch.Tensor:
        return self.loss(self.model(**self.kwargs))


def gpt2(
    device: str, num_layers: int = 12, dropout: float = 0.1, batch_size: int = 6, **sizes: int
) -> Case:
    """A GPT-2 with a small vocabulary: logits larger than a block would hide what plans save."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=num_layers,
        **{"n_embd": 256, "n_head": 8, "n_positions": 256, "vocab_size": 2048, **sizes},
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).to(device).train()
    model.loss_type = "ForCausalLM"  # or it warns that it has to guess
    ids = torch.randint(config.vocab_size, (batch_size, config.n_positions), device=device)
    kwargs = {"input_ids": ids, "labels": ids}
    return Case(model, kwargs, _loss_of, model.transformer, "h")


def llama(
    device: str,
    num_layers: int = 12,
    batch_size: int = 6,
    length: int = 256,
    **sizes: int,
) -> Case:
    """A Llama of the size of the GPT-2, which has no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        **{
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_attention_heads": 8,
            "vocab_size": 2048,
            **sizes,
        },
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(device).train()
    ids = torch.randint(config.vocab_size, (batch_size, length), device=device)
    return Case(model, {"input_ids": ids, "labels": ids}, _loss_of, model.model, "layers")


def llama_of_many_words(device: str) -> Case:
    """A Llama of 6 layers whose logits, of Llama's 32,000 words, take more than all its blocks."""
    return llama(device, num_layers=6, batch_size=2, length=1024, vocab_size=32_000)


def vit(device: str, num_layers: int = 12, batch_size: int = 8, **sizes: int) -> Case:
    """A ViT of 256 units over 196 patches, with dropout 0.1."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=num_layers,
        **{"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, **sizes},
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=100,
        attn_implementation="sdpa",
    )
    model = ViTForImageClassification(config).to(device).train()
    pixels = torch.randn(batch_size, 3, 224, 224, device=device)
    labels = torch.randint(100, (batch_size,), device=device)
    kwargs = {"pixel_values": pixels, "labels": labels}
    return Case(model, kwargs, _loss_of, *_layers_of(model))


def _layers_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that has the longest list, and the name of the list."""
    found = [
        (len(each), parent, name)
        for parent in model.modules()
        for name, each in parent.named_children()
        if isinstance(each, nn.ModuleList)
    ]
    _, parent, name = max(found, key=lambda one: one[0])
    return parent, name


def _loss_of(output):
    return output.loss


class Bottleneck(nn.Module):
    """The block of ResNet-50, with its stride at the 3x3 convolution (v1.5)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        num_inner = num_out // 4
        self.conv1 = nn.Conv2d(num_in, num_inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_inner)
        self.conv2 = nn.Conv2d(num_inner, num_inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_inner)
        self.conv3 = nn.Conv2d(num_inner, num_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_out)
        self.downsample = None
        if stride != 1 or num_in != num_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + shortcut, inplace=True)


class ResNet(nn.Module):
    """ResNet-50 of torchvision's form, with `width` channels in its stem (64 there)."""

    def __init__(self, num_blocks: tuple[int, ...], width: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, num_in = [], width
        for stage, num in enumerate(num_blocks):
            num_out = 4 * width * 2**stage
            for index in range(num):
                blocks.append(Bottleneck(num_in, num_out, 2 if stage and not index else 1))
                num_in = num_out
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(num_in, num_classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def resnet(
    device: str,
    num_blocks: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 32,
    batch_size: int = 64,
    size: int = 128,
) -> Case:
    """A narrower ResNet-50: the original's gradients would be most of the peak at this batch."""
    torch.manual_seed(0)
    model = ResNet(num_blocks, width, num_classes=100).to(device).train()
    x = torch.randn(batch_size, 3, size, size, device=device)
    labels = torch.randint(100, (batch_size,), device=device)
    return Case(model, {"x": x}, CrossEntropy(labels), model, "blocks")


class CrossEntropy:
    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels

    def __call__(self, logits):
        return F.cross_entropy(logits, self.labels)


MANY_WORDS = "Llama, 32,000 words"
MODELS = {"GPT-2, 12 layers": gpt2, "ResNet-50": resnet, MANY_WORDS: llama_of_many_words}
# The same with few blocks and without dropout, for checks of what draws and rounds otherwise.
SMALL = {
    "GPT-2, 12 layers": lambda device: gpt2(device, num_layers=3, dropout=0.0, batch_size=2),
    "ResNet-50": lambda device: resnet(device, (1, 1, 1, 1), width=16, batch_size=8, size=64),
    MANY_WORDS: lambda device: llama(device, num_layers=3, batch_size=2),
}
# Those that are also planned compiled.
COMPILED = {"GPT-2, 12 layers": gpt2, "Llama": llama, "ViT": vit, "ResNet-50": resnet}
