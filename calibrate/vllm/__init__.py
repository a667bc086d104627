"""A plug-in for vLLM: applies constants and rules of log n, per head, to an unchanged model.

    CALIBRATE_VLLM_FIT=mine@1 CALIBRATE_VLLM_FIT_ID=sha256:... \\
        vllm serve MODEL --model-impl transformers

vLLM calls `plug_in` in each of its processes, by the entry point "vllm.general_plugins". Without
CALIBRATE_VLLM_FIT nothing is imported and nothing changes. With it, queries are multiplied by

    beta(layer, head, n),  n = min(position + 1, sliding window),

before the attention of vLLM, so that the softmax of their logits is softmax(beta z). n is the
number of keys that a query sees, as in calibrate.transformers.

CALIBRATE_VLLM_FIT is a reference or a path, and CALIBRATE_VLLM_FIT_ID the fit's id, which
`calibrate fits show` prints. The fit must be made for the files of this model, unless
CALIBRATE_VLLM_ANY_MODEL is 1 (for the model in another dtype, say). vLLM does not start if the fit
would not be exact: for a rule of entropy, layers or heads that the model lacks, another
implementation of the model, a soft-cap, attention sinks, latent attention (MLA). Tensor-parallel
ranks apply the rules of their own heads.
"""

import os

from calibrate.errors import CoefficientsError

FIT_VARIABLE = "CALIBRATE_VLLM_FIT"
FIT_ID_VARIABLE = "CALIBRATE_VLLM_FIT_ID"


def plug_in() -> None:
    """Applies the fit that the environment names to the model that this process will load.

    vLLM may call it several times.

    Raises:
      CoefficientsError: the fit cannot be loaded, has another id, or depends on entropy.
    """
    reference = os.environ.get(FIT_VARIABLE)
    if not reference:
        return
    from calibrate.export.plan import slopes
    from calibrate.store.fit import digest
    from calibrate.store.loading import load

    fit, expected = load(reference), os.environ.get(FIT_ID_VARIABLE)
    if digest(fit) != expected:
        raise CoefficientsError(
            f"{FIT_VARIABLE} is {fit.reference}, whose id is {digest(fit)}, and "
            f"{FIT_ID_VARIABLE} is {expected!r}; "
            "set it to the id of the fit that you mean"
        )
    slopes(fit)  # refuses rules of entropy
    from calibrate.vllm.backend import ANY_MODEL_VARIABLE, apply_in_vllm

    apply_in_vllm(fit, any_model=os.environ.get(ANY_MODEL_VARIABLE) == "1")
