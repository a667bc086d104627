"""Classes of Transformers, each once, tiny: a fit of beta 1 leaves the model as it was, a sharp one
changes it, and `apply` accepts those alone in which no softmax weighs values but ours.
"""

import re
import sys

import pytest
import torch
from tiny_models import possible_inputs, tiny_model
from torch.overrides import TorchFunctionMode

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit
from calibrate.transformers import apply
from calibrate.transformers.verification import module_paths, probe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# All softmax attention is registered attention.
EVERYWHERE = """
    afmoe albert altclip apertus arcee aria_text bart beit bert bert-generation biogpt bitnet
    blenderbot blenderbot-small camembert canary chinese_clip chinese_clip_vision_model clip
    clip_text_model clip_vision_model clipseg cohere cohere2 cohere2_moe cohere_asr
    cosmos3_edge_text ctrl cwm data2vec-audio data2vec-text deepseek_v3 deit dia diffllama dinov2
    dinov2_with_registers dinov3_vit distilbert doge dpr dpt electra ernie ernie4_5 eurobert exaone4
    exaone_moe falcon_h1 flex_olmo flint fuyu gemma gemma2 gemma3_text glm glm4 glm4_moe
    glm4_moe_lite glmasr_encoder gpt-sw3 gpt_bigcode gpt_neox gpt_oss gradium_phonon_tts granite
    granite_docling_text granite_docling_vision granite_swa granitemoe granitemoe_swa
    granitemoeshared gte helium higgs_audio_v2 hrm_text hubert hy_v3 hyperclovax idefics3_vision
    ijepa inkling2_text inkling_mm_model inkling_text internlm3 internvl_vision jais2 jetmoe
    jina_embeddings_v3 kolibri1 layoutlm lfm2 lfm3 llama4_text m2m_100 marian markuplm mbart mellum
    metaclip_2 mimi_encoder mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral3
    mistral mixtral mlcd modernbert modernbert-decoder molmo2_text moshi
    moss_transcribe_diarize_audio mt5 muse_glimmer_text muse_spark_text nanochat nllb-moe nomic_bert
    olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter opt parakeet_ctc parakeet_encoder
    parakeet_rnnt parakeet_tdt pe_audio_encoder pegasus persimmon phi phi3 phimoe pixio pixtral
    plbart pocket_tts pocket_tts_audio_tokenizer_encoder qianfan_ocr_vision qwen2
    qwen2_audio_encoder qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    qwen3_vl_moe_text qwen3_vl_text radio roberta roberta-prelayernorm roc_bert sam3_vision_model
    sam3_vit_model sapiens2 seed_oss sew smollm3 smolvlm_vision solar_open speech_to_text splinter
    stablelm starcoder2 switch_transformers t5 t5gemma tipsv2 tipsv2_text_model tipsv2_vision_model
    ultrabert umt5 unispeech unispeech-sat vaultgemma videoprism_vision_model
    vision-text-dual-encoder vit vit_mae vit_msn vjepa2 voxtral_encoder voxtral_realtime_encoder
    wav2vec2 wav2vec2-bert wav2vec2-conformer whisper xlm-roberta xlm-roberta-xl yolos youtu zaya
""".split()  # noqa: SIM905
# They run on text alone, and so do not run what is for images, sound or proteins.
NOT_ALL_RUNS = """
    aria audioflamingo3 aya_vision cohere2_vision cosmos3_edge cosmos3_omni deepseek_vl
    deepseek_vl_hybrid evolla exaone4_5 florence2 gemma3 glmasr granite_docling
    hyperclovax_vision_v2 idefics2 idefics3 inkling2 internvl kimi_k25 kosmos-2.5 lfm2_vl lfm3_vl
    lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax_m3_vl mistral3 mllama modernvbert moss_transcribe_diarize muse_glimmer
    musicflamingo ovis2 paligemma qianfan_ocr qwen2_audio qwen3_5 qwen3_5_moe
    qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe sam3 sam3_lite_text seamless_m4t
    seamless_m4t_v2 smolvlm t5gemma2 ultravbert unlimited_ocr video_llama_3 video_llava vipllava
    voxtral
""".split()  # noqa: SIM905
# Some attention has code of its own, in modules of this class.
PARTLY_PLAIN = {
    "aimv2": "Aimv2AttentionPoolingHead",
    "aimv2_vision_model": "Aimv2AttentionPoolingHead",
    "bigbird_pegasus": "BigBirdPegasusSelfAttention",
    "deepseek_v4": "DeepseekV4HyperConnection",
    "gemma4_audio": "Gemma4AudioAttention",
    "git": "GitSelfAttention",
    "longt5": "LongT5LocalAttention",
    "pegasus_x": "PegasusXGlobalLocalAttention",
    "rf_detr": "RfDetrMultiscaleDeformableAttention",
    "sam_hq_vision_model": "SamHQVisionSdpaAttention",
    "sam_vision_model": "SamVisionSdpaAttention",
    "siglip": "MultiheadAttention",
    "siglip_vision_model": "MultiheadAttention",
}

SHARP = Fit(RuleForm(min_entropy=0.0), (Entry((0.0, 0.0, 0.0, 0.0, 3.0), (0.0, 8.0)),))
ROUTERS = re.compile("Router|Gating")  # their softmax chooses experts


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class PlainSoftmax(TorchFunctionMode):
    """The classes of the modules that call softmax or attention, other than from our code.

    By other means than `apply`: PyTorch's functions, and the frames of their callers.
    """

    def __init__(self):
        super().__init__()
        self.classes = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if "log_softmax" not in name and ("softmax" in name or "attention" in name):
            frame, files = sys._getframe(1), set()
            while not isinstance(frame.f_locals.get("self"), torch.nn.Module):
                files.add(frame.f_code.co_filename)
                frame = frame.f_back
            if not any("/calibrate/" in file for file in files):
                self.classes.add(type(frame.f_locals["self"]).__name__)
        return func(*args, **(kwargs or {}))


def outputs(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        rest, found = [list(model(**inputs).items())], []
    while rest:
        match rest.pop():
            case torch.Tensor() as x if x.is_floating_point() and x.numel():
                found.append(x)
            case dict() as x:
                rest += x.values()
            case (str(name), x) if "past" not in name:
                rest.append(x)
            case list() | tuple() as x if not isinstance(next(iter(x), 0), str):
                rest += x
    return found


def difference(ours, own):
    return max(float((x - y).abs().max()) for x, y in zip(ours, own, strict=True))


def runs(model_type):
    """(model, inputs, its own outputs)"""
    model = tiny_model(model_type)
    for inputs in possible_inputs(model):
        try:
            return model, inputs, outputs(model, inputs)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            failure = error
    raise failure


def apply_to(model, fit, inputs, parts):
    for part in parts:
        apply(model, fit, part=part, **inputs)


def is_changed_by_the_fit_alone(model, inputs, own, parts=(None,)):
    """Raises unless identity is the model's own; whether the sharp fit is not."""
    scale = max(1.0, *(float(x.abs().max()) for x in own))
    apply_to(model, calibrate.identity(), inputs, parts)
    error = difference(outputs(model, inputs), own)
    assert error < 1e-3 * scale
    apply_to(model, SHARP, inputs, parts)
    return difference(outputs(model, inputs), own) > max(1e-2, 10 * error)


def plain_classes(model, inputs):
    with PlainSoftmax() as plain:
        outputs(model, inputs)
    return {name for name in plain.classes if not ROUTERS.search(name)}


def parts_that_look_up(model, inputs):
    """The paths of the modules that call registered attention."""
    reached = probe(model, inputs).reached
    return sorted({path for module, path in module_paths(model).items() if module in reached})


@pytest.mark.parametrize("model_type", EVERYWHERE)
def test_a_fit_reaches_all_attention(model_type):
    model, inputs, own = runs(model_type)
    assert is_changed_by_the_fit_alone(model, inputs, own)
    assert not plain_classes(model, inputs)


@pytest.mark.parametrize("model_type", NOT_ALL_RUNS)
def test_what_does_not_run_is_named(model_type):
    model, inputs, own = runs(model_type)
    with pytest.raises(calibrate.CoefficientsError, match=r"\(\w+\)"):
        apply(model, SHARP, **inputs)
    parts = parts_that_look_up(model, inputs)
    assert is_changed_by_the_fit_alone(model, inputs, own, parts)
    assert not plain_classes(model, inputs)


@pytest.mark.parametrize("model_type", PARTLY_PLAIN)
def test_what_stays_plain_is_named(model_type):
    model, inputs, own = runs(model_type)
    name = PARTLY_PLAIN[model_type]
    with pytest.raises(calibrate.CoefficientsError, match=rf"\({name}\)"):
        apply(model, SHARP, **inputs)
    assert difference(outputs(model, inputs), own) == 0
    is_changed_by_the_fit_alone(model, inputs, own, parts_that_look_up(model, inputs))
    assert name in plain_classes(model, inputs)
