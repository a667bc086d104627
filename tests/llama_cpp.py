"""Answers of llama.cpp to a .gguf file, through the package xllamacpp (extra `engines`)."""

import numpy as np
import xllamacpp


class LlamaCpp:
    """One model, on one thread, with float32 keys and values and llama.cpp's own attention.

    Args:
      fast: with its fused attention and float16 keys and values, as it serves by default.
    """

    def __init__(self, path, context=256, fast=False):
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(path), context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.fit_params, params.verbosity = False, False, -1
        if not fast:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)
        self.address = self._server.listening_address

    def log_p(self, tokens, vocabulary):
        """log p (vocabulary,) of the token after these ids."""
        answer = self._complete(tokens, 1, logprobs=True, n_probs=vocabulary)
        listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = np.full(vocabulary, np.nan)
        for entry in listed:
            found[entry["id"]] = entry["logprob"]
        return found

    def continued(self, tokens, count):
        """The ids of its most likely next tokens, one after the other."""
        answer = self._complete(tokens, count, logprobs=True, n_probs=1, ignore_eos=True)
        return [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]

    def _complete(self, tokens, count, **options):
        return self._server.handle_completions(
            {"prompt": [int(t) for t in tokens], "max_tokens": count, "temperature": 0.0,
             "cache_prompt": False} | options
        )  # fmt: skip
