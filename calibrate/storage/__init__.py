"""Files of any kind: atomic writes, strict JSON, npz, safetensors, GGUF headers, fingerprints."""
