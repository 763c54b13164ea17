"""The Prometheus series of a server."""

import pytest
from fakes import MODEL, STORY, wait_for
from prometheus_client.parser import text_string_to_metric_families

from specserve.serve.engine.interface import EngineStats
from specserve.serve.http.admin.metrics import Metrics


def _series(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_count_tokens_speculation_and_latency(http, fake_engine):
    wait_for(lambda: fake_engine.num_active == 0)
    before = _series(http.get("/metrics").text)
    http.post("/v1/completions", json={"prompt": "hello", "n": 2})
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "_created" not in reply.text
    after = _series(reply.text)
    label = f'{{model_name="{MODEL}"}}'

    def grown(name: str, labels: str = label) -> float:
        return after[f"vllm:{name}{labels}"] - before.get(f"vllm:{name}{labels}", 0.0)

    assert grown("prompt_tokens_total") == 10
    assert grown("generation_tokens_total") == 2 * len(STORY)
    assert grown("spec_decode_num_drafts_total") == 6
    assert after[f"specserve:sequence_steps_total{label}"] - before[f"specserve:sequence_steps_total{label}"] == 6
    assert grown("spec_decode_num_draft_tokens_total") == 18
    assert grown("spec_decode_num_accepted_tokens_total") == 8
    position = f'{{model_name="{MODEL}",position="1"}}'
    assert grown("spec_decode_num_accepted_tokens_per_pos_total", position) == 2
    assert grown("request_success_total", f'{{finished_reason="stop",model_name="{MODEL}"}}') == 2
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("e2e_request_latency_seconds_count") == 2
    for name, seconds in {"queue": 0.25, "prefill": 0.5, "decode": 2.0, "inference": 2.5}.items():
        assert grown(f"request_{name}_time_seconds_sum") == 2 * seconds
    assert grown("request_time_per_output_token_seconds_sum") == pytest.approx(2 * 2.0 / (len(STORY) - 1))
    assert (grown("request_prompt_tokens_sum"), grown("request_generation_tokens_sum")) == (10, 2 * len(STORY))
    assert (grown("request_params_n_sum"), grown("request_params_n_count")) == (2, 1)
    assert grown("request_params_max_tokens_sum") == 16
    assert after["process_resident_memory_bytes"] > 0
    assert grown("inter_token_latency_seconds_count") == 2 * (len(STORY) - 2)


def test_metrics_tell_the_engines_own_state_at_the_scrape(http, fake_engine, monkeypatch):
    stats = EngineStats(
        num_waiting=4,
        num_pages=50,
        num_pages_held=20,
        num_pages_cached=7,
        num_prefix_queries=1000,
        num_prefix_hits=600,
        num_preemptions=3,
        num_rebuilds=1,
        num_steps=35,
        num_steps_by_speculation={"off": 5, "chain:3": 30},
        round_sizes=(0, 1, *[0] * 11, 2),
        num_round_tokens=2 * 20_000 + 7,
        page_size=32,
        cache_dtype="int8",
        is_caching=True,
        busy_seconds=2.5,
        host_seconds=0.25,
        num_programs_left=6,
        num_late_compiles=2,
        estimated_speedup=1.75,
        num_caught_up=70,
        num_promised=12.5,
        num_kept=9,
        confidence_trust=0.75,
        seconds_in_step=0.125,
    )
    monkeypatch.setattr(fake_engine, "state", stats)
    with http.stream("POST", "/v1/completions", json={"prompt": "slow", "stream": True}):
        found = _series(http.get("/metrics").text)
    label = f'{{model_name="{MODEL}"}}'
    assert {name: found[name + label] for name in _names(found, label, "specserve:")} == {
        "specserve:pages": 50,
        "specserve:pages_cached": 7,
        "specserve:programs_left": 6,
        "specserve:rebuilds_total": 1,
        "specserve:busy_seconds_total": 2.5,
        "specserve:host_seconds_total": 0.25,
        "specserve:late_compiles_total": 2,
        "specserve:estimated_speedup": 1.75,
        "specserve:draft_catch_up_tokens_total": 70,
        "specserve:confidence_promised_tokens_total": 12.5,
        "specserve:confidence_kept_tokens_total": 9,
        "specserve:confidence_trust": 0.75,
        "specserve:seconds_in_step": 0.125,
        "specserve:unknown_fields_total": 0,
    } | {name: found[name + label] for name in ["specserve:sequence_steps_total", "specserve:sequence_cut_steps_total"]}
    assert found[f'specserve:steps_total{{model_name="{MODEL}",speculation="chain:3"}}'] == 30
    assert found[f'specserve:steps_total{{model_name="{MODEL}",speculation="off"}}'] == 5
    rounds = {name: value for name, value in found.items() if name.startswith("vllm:iteration_tokens_total")}
    assert rounds[f"vllm:iteration_tokens_total_sum{label}"] == 2 * 20_000 + 7
    assert sorted(rounds.values())[:-1] == [0, *[1] * 12, 3, 3], "counts up to each size; and of all, twice"
    facts = f'block_size="32",cache_dtype="int8",enable_prefix_caching="True",model_name="{MODEL}",num_gpu_blocks="50"'
    assert found[f"vllm:cache_config_info{{{facts}}}"] == 1
    expected = {
        "num_requests_running": 1,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.4,
        "gpu_cache_usage_perc": 0.4,
        "prefix_cache_queries_total": 1000,
        "gpu_prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 600,
        "gpu_prefix_cache_hits_total": 600,
        "num_preemptions_total": 3,
    }
    assert {name: found[f"vllm:{name}{label}"] for name in expected} == expected


ROUTERS = {  # the series that they read, with the labels
    "Gateway API inference extension, llm-d": [
        *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="50"',
    ],
    "production-stack": [
        *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:gpu_cache_usage_perc"),
        *("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"),
    ],
}


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_find_the_series_that_they_read(router):
    text = Metrics("a", lambda: EngineStats(num_pages=50, page_size=16)).render().decode()
    families = list(text_string_to_metric_families(text))
    samples = {sample.name: sample for family in families for sample in family.samples}
    for series in ROUTERS[router]:
        name, _, labels = series.partition("{")
        for label in filter(None, labels.split(",")):
            key, value = label.split("=")
            assert samples[name].labels[key] == value.strip('"')
        assert samples[name].labels["model_name"] == "a"


def test_an_engine_without_pages_has_an_empty_cache():
    assert b'vllm:kv_cache_usage_perc{model_name="a"} 0.0' in Metrics("a", EngineStats).render()


def test_two_apps_have_registries_of_their_own():
    assert Metrics("a", EngineStats).registry is not Metrics("a", EngineStats).registry


def _names(series: dict[str, float], label: str, prefix: str) -> list[str]:
    return [name.removesuffix(label) for name in series if name.startswith(prefix) and name.endswith(label)]
