from __future__ import annotations
import torch
from recoup.residuals.sources import own_generator


def scales(shape, seed, p, *, dtype, device):
    p = round(p * 65536) / 65536
    if p == 1:
        return torch.zeros(shape, dtype=dtype, device=device)
    m = torch.rand(shape, generator=own_generator(torch.device(device), seed), device=device) >= p
    return m.to(dtype) / (1 - p)


def dropped(w, seed, p, axes=()):
    shape = tuple(1 if a in axes else n for a, n in enumerate(w.shape))
    return w.detach() * scales(shape, seed, p, dtype=w.dtype, device=w.device)


def dropped_(w, seed, p, axes=()):
    shape = tuple(1 if a in axes else n for a, n in enumerate(w.shape))
    return w.mul_(scales(shape, seed, p, dtype=w.dtype, device=w.device))


def noised(w, seed, std):
    return (
        w.detach()
        + torch.randn(w.shape, generator=own_generator(w.device, seed), device=w.device).to(w.dtype)
        * std
    )


def noised_(w, seed, std):
    return w.add_(
        torch.randn(w.shape, generator=own_generator(w.device, seed), device=w.device).to(w.dtype)
        * std
    )
