"""Third-party models: a transformers folder, a hub name or a GGUF file as a denoiser with its weights."""

from __future__ import annotations

from unmask.pretrained.base import Pretrained as Pretrained
from unmask.pretrained.base import Source as Source
from unmask.pretrained.families import read_pretrained as read_pretrained
from unmask.pretrained.source import open_source as open_source
