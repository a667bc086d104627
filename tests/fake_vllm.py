"""A stand-in for the parts of vLLM that the plug-in touches: its registry, and models that run the
code of Transformers. Sequences are joined along the tokens, and positions of each begin at 0.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "vllm.model_executor.models"


def attention(module, query, key, value, attention_mask, position_ids=None, **_):
    """Causal attention of each sequence to itself."""
    sequence = (position_ids[0] == 0).cumsum(0)
    own = sequence[:, None] == sequence
    window = module.attn.sliding_window
    distance = position_ids[0][:, None] - position_ids[0]
    seen = own & (distance >= 0) & (distance < (window or distance.max() + 1))
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=module.scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


class Base(nn.Module):
    """vLLM's base of models that run the code of Transformers."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.model_config = vllm_config.model_config
        self.device_config = SimpleNamespace(device="cpu")
        self.tp_group = vllm_config.tp_group
        self.pp_group = vllm_config.pp_group
        self.text_config = self.model_config.hf_config
        self.text_config._attn_implementation = "vllm"
        self.model = AutoModel.from_config(self.text_config).eval().requires_grad_(False)
        for module in self.model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "q_proj"):
                window = getattr(module, "sliding_window", None)
                module.attn = SimpleNamespace(sliding_window=window)
                module.is_causal = vllm_config.is_causal
        self.text_config._attn_implementation = vllm_config.attention

    def forward(self, input_ids, positions):
        return self.model(input_ids[None], position_ids=positions[None], use_cache=False)[0][0]

    def load_weights(self, weights):
        return self.model.load_state_dict(dict(weights), strict=False)


class TransformersForCausalLM(Base):
    pass


class LlamaForCausalLM(nn.Module):
    """vLLM's own implementation, which no fit reaches."""


def configuration(
    model, config, rank=0, n_ranks=1, attention="vllm", runner="generate", revision=None,
    is_first_stage=True, is_causal=True, download_dir=None,
):  # fmt: skip
    """What vLLM tells a model: its name or folder, its configuration, and which rank it is on.

    Args:
      runner: "draft" of a model whose guesses another one checks.
      is_first_stage: of a pipeline, whose stages load a part of the layers each.
      is_causal: False of an encoder, which vLLM runs, too.
      download_dir: where weights are downloaded to; None is the Hub's cache.
    """
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), revision=revision, hf_config=config, runner_type=runner
        ),
        pp_group=SimpleNamespace(is_first_rank=is_first_stage),
        is_causal=is_causal,
        tp_group=SimpleNamespace(rank_in_group=rank, world_size=n_ranks),
        load_config=SimpleNamespace(download_dir=download_dir),
        additional_config={},
        attention=attention,
    )


def install(setitem=dict.__setitem__):
    """Puts the stand-in where vLLM would be imported from; a registry of its own each time."""

    classes = {"LlamaForCausalLM": LlamaForCausalLM, "Backend": TransformersForCausalLM}

    class Registry:
        def resolve_model_cls(self, architectures, model_config):
            return classes[architectures[0]], architectures[0]

    names = (
        "vllm",
        "vllm.model_executor",
        NAME,
        f"{NAME}.transformers",
        f"{NAME}.transformers.base",
    )
    modules = {name: ModuleType(name) for name in names}
    modules[NAME].ModelRegistry = Registry()
    modules[names[-1]].Base = Base
    for name, module in modules.items():
        setitem(sys.modules, name, module)
    setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", attention)
    return modules[NAME].ModelRegistry


def joined(sequences):
    """Tokens of all sequences, and the position of each in its own."""
    return torch.cat(sequences), torch.cat([torch.arange(len(x)) for x in sequences])
