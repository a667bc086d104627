"""The variables of the environment that tell the plug-in for vLLM which fit to apply."""

FIT = "CALIBRATE_VLLM_FIT"
FIT_ID = "CALIBRATE_VLLM_FIT_ID"
ANY_MODEL = "CALIBRATE_VLLM_ANY_MODEL"
