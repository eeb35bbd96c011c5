"""perf model: its decoder, what it takes for wrong, and the report."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from graphar.numerics.codecs import codec
from perf import __main__ as program
from perf.harness.ranks import InProcessRanks
from perf.models.bench import after_linear
from perf.models.decoder import (
    DECODE,
    EPS,
    PLAIN,
    PREFILL,
    SIZES,
    THETA,
    TINY,
    Cache,
    Case,
    Layer,
    Shard,
    add_and_norm,
    make_decoder,
    make_head,
    make_inputs,
    rope_cos_sin,
)
from perf.peers.matmuls import Variant
from perf.topics import model
from perf.topics.model import ALONE, NORM, UNSHARDED, Model, ModelPlan
from tests.perf.samples import model_row as row

CPU = torch.device("cpu")
WHOLE = Shard(0, 1, CPU)
SIZE, LAYERS = SIZES[TINY], 2


def without_sum(a, weight, residual, scale):
    return after_linear(torch.nn.functional.linear, add_and_norm, a, weight, residual, scale)


def test_a_token_that_is_decoded_has_the_output_it_has_at_the_end_of_a_prompt():
    decoder = make_decoder(SIZE, LAYERS, WHOLE)
    prompt = make_inputs(SIZE, LAYERS, Case(PREFILL, 9, 9), WHOLE)
    of_prompt = decoder.step(prompt, PLAIN, without_sum)
    for cache in prompt.caches:
        cache.keys[:, :, -1], cache.values[:, :, -1] = torch.nan, torch.nan
    last = Case(DECODE, 1, 9)
    inputs = dataclasses.replace(prompt, case=last, x=prompt.x[-1:], cos_sin=rope_cos_sin(last, SIZE.head_size, CPU))

    of_token = decoder.step(inputs, PLAIN, without_sum)

    torch.testing.assert_close(of_token, of_prompt[-1:], rtol=0.02, atol=0.02)


def test_no_token_of_a_prompt_sees_a_later_one():
    decoder, inputs = make_decoder(SIZE, LAYERS, WHOLE), make_inputs(SIZE, LAYERS, Case(PREFILL, 9, 9), WHOLE)
    before = decoder.step(inputs, PLAIN, without_sum)
    inputs.x[5] = 0

    after = decoder.step(inputs, PLAIN, without_sum)

    same = [torch.equal(tensor, other) for tensor, other in zip(before, after, strict=True)]
    assert same[:6] == [True] * 5 + [False]


def test_it_has_the_logits_of_transformers_llama():
    transformers = pytest.importorskip("transformers", reason="transformers cannot be imported")
    made = make_decoder(SIZE, LAYERS, WHOLE)
    layers = [Layer(**{name: tensor.float() for name, tensor in vars(layer).items()}) for layer in made.layers]
    decoder = dataclasses.replace(made, layers=layers, final_norm=made.final_norm.float())
    tokens, embedding, head = torch.arange(9), make_head(SIZE, CPU).float(), make_head(SIZE, CPU).float()
    inputs = make_inputs(SIZE, LAYERS, Case(PREFILL, 9, 9), WHOLE)
    caches = [Cache(cache.keys.float(), cache.values.float()) for cache in inputs.caches]
    inputs = dataclasses.replace(inputs, x=embedding[tokens], caches=caches)
    theirs = transformers.LlamaForCausalLM(llama_config(transformers)).eval()
    theirs.load_state_dict(llama_weights(decoder, embedding, head))

    with torch.no_grad():
        expected = theirs(tokens.unsqueeze(0)).logits[0]

    torch.testing.assert_close(decoder.step(inputs, PLAIN, without_sum) @ head.t(), expected, rtol=1e-4, atol=1e-4)


def llama_config(transformers):
    return transformers.LlamaConfig(
        hidden_size=SIZE.hidden,
        intermediate_size=SIZE.inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=SIZE.heads,
        num_key_value_heads=SIZE.kv_heads,
        vocab_size=SIZE.vocabulary,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        use_cache=False,
    )


def llama_weights(decoder, embedding, head):
    """A decoder's weights, by their names in transformers."""
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": decoder.final_norm}
    kv_width = SIZE.kv_heads * SIZE.head_size
    for at, layer in enumerate(decoder.layers):
        query, key, value = layer.query_key_value.split([SIZE.hidden, kv_width, kv_width])
        gate, up = layer.gate_up.chunk(2)
        attention = {"q": query, "k": key, "v": value, "o": layer.out}
        mlp = {"gate": gate, "up": up, "down": layer.down}
        of_layer = {f"self_attn.{name}_proj": weight for name, weight in attention.items()}
        of_layer |= {f"mlp.{name}_proj": weight for name, weight in mlp.items()}
        of_layer |= {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        weights |= {f"model.layers.{at}.{name}.weight": weight for name, weight in of_layer.items()}
    return weights


def test_shares_of_a_model_are_its_parts():
    whole, *parts = (make_decoder(SIZE, 1, share).layers[0] for share in (WHOLE, *(Shard(r, 2, CPU) for r in (0, 1))))

    assert torch.equal(torch.cat([part.out for part in parts], 1), whole.out)
    assert torch.equal(torch.cat([part.down for part in parts], 1), whole.down)
    gates = [part.gate_up.chunk(2)[0] for part in parts]
    assert torch.equal(torch.cat(gates), whole.gate_up.chunk(2)[0])
    queries = [part.query_key_value[: SIZE.hidden // 2] for part in parts]
    assert torch.equal(torch.cat(queries), whole.query_key_value[: SIZE.hidden])


def test_a_model_without_its_sums_is_wrong_in_every_token(group_of):
    group_of(2)
    outputs, expected = (
        make_decoder(SIZE, LAYERS, share).step(
            make_inputs(SIZE, LAYERS, Case(PREFILL, 9, 9), share), PLAIN, without_sum
        )
        for share in (Shard(0, 2, CPU), WHOLE)
    )

    errors, apart = model.compare_logits(outputs, expected, make_head(SIZE, CPU))

    assert not apart.any()
    assert model.wrong_tokens(errors, apart, Variant(ALONE, without_sum, codec=codec("int8")), LAYERS).all()


def test_a_token_whose_logits_are_not_the_first_ranks_is_apart(monkeypatch):
    monkeypatch.setattr(dist, "broadcast", lambda sent, first: sent[1, :1].bitwise_xor_(1))
    normed, head = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()

    errors, apart = model.compare_logits(normed, normed, head)

    assert errors.tolist() == [0, 0, 0]
    assert apart.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("error", "apart", "kind", "wrong"),
    [
        (0.03, False, {}, False),
        (0.04, False, {}, True),
        (0.04, False, {"codec": codec("int8")}, False),
        (0.2, False, {"codec": codec("int8")}, True),
        (float("nan"), False, {}, True),
        (0.0, True, {}, False),
        (0.0, True, {"exact": True}, True),
    ],
)
def test_a_token_is_wrong_that_is_too_far_off_or_has_not_the_bits_it_promises(error, apart, kind, wrong):
    variant = Variant("one", without_sum, **kind)

    mask = model.wrong_tokens(torch.tensor([error]), torch.tensor([apart]), variant, layers=4)

    assert mask.tolist() == [wrong]


def test_without_the_unsharded_model_no_row_is_taken_for_right_and_the_next_case_is_measured(group_of):
    group_of(1)

    class One(InProcessRanks):
        device = CPU

    def too_large(*_):
        raise RuntimeError("out of memory")

    bench = model.Bench(ModelPlan("cpu", 1, TINY, 1, (1,), ()), One(1), PLAIN)
    variants = [Variant(UNSHARDED, too_large), Variant("graphar", without_sum)]

    rows = list(bench.measure(Case(DECODE, 1, 4), variants))

    assert rows == [
        "unsharded, decode of 1 tokens: out of memory",
        "decode of 1 tokens: no result of the unsharded model to compare with",
    ]


def test_a_wrong_result_makes_the_command_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model.ranks_of, "run", lambda size, work: [row("graphar", 5.0, wrong=2)])

    assert program.main(["model", "--generate", "0", "--out", str(tmp_path)]) == 1
    assert "WRONG RESULTS: 1 of 1 (graphar at 4 layers" in capsys.readouterr().out


ROWS = [
    row(UNSHARDED, 800.0, None),
    row(ALONE, 200.0, None),
    row("nccl", 400.0),
    row("graphar", 320.0),
    row(NORM, 250.0),
]


def sections(rows):
    (section,) = Model(rows).sections()
    return section


def test_a_table_has_what_is_calculated_for_all_layers_and_what_communication_takes():
    *_, nccl, _, norm = sections(ROWS).body[0].splitlines()

    assert nccl == "| nccl | 400.0 | 1.00 | 50.0 | 50.0 | 8 | 1,000 | 0.0100 |"
    assert norm == "| graphar + norm | 250.0 | 0.62 | 12.5 | 20.0 | 5 | 1,600 | 0.0100 |"


def test_a_glance_is_of_the_fastest_method():
    assert Model(ROWS).verdict() == "All 3 results were verified: none is wrong."
    assert Model(ROWS).glance().headline == "0.62"


def test_wrong_results_are_named_and_win_nothing():
    report = Model([*ROWS[:-1], row(NORM, 250.0, wrong=2)])

    assert "WRONG RESULTS: 1 of 3 (graphar + norm at 4 layers of llama-3-70b, decode of 8 tokens)" in report.verdict()
    assert report.glance().headline == "0.80"  # graphar alone
    assert "| graphar + norm **(2 WRONG)** |" in sections(report.rows).body[0]


def test_nothing_is_compared_with_a_wrong_peer():
    rows = [of_row if of_row.method != "nccl" else row("nccl", 400.0, wrong=2) for of_row in ROWS]

    assert "| graphar | 320.0 | - |" in sections(rows).body[0]


def test_a_chart_has_a_row_for_each_step():
    (mark,) = Model(ROWS).ratio_chart().marks

    assert (mark.row, mark.value) == ("decode of 8 tokens", 0.625)
