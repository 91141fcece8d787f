"""Every causal-LM family of the installed Transformers, on a tiny model of it."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.architectures import FAMILIES, UNBUILT


def test_every_family_has_a_tiny_model_or_a_reason():
    assert set(FAMILIES) | set(UNBUILT) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(FAMILIES) >= 120
