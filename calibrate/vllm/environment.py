"""The environment variables of the plug-in for vLLM: which fit to apply, and to which model."""

FIT_VARIABLE = "CALIBRATE_VLLM_FIT"
FIT_ID_VARIABLE = "CALIBRATE_VLLM_FIT_ID"
ANY_MODEL_VARIABLE = "CALIBRATE_VLLM_ANY_MODEL"
