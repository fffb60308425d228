"""Names, help and labels of every metric. A page with one model that nobody has used yet shows them all."""

from __future__ import annotations

import re

from tokenflow_prometheus.sink import PrometheusSink

from tokenflow.api import Gauges, ModelGauges

MODEL = ModelGauges(
    model="small",
    ready=True,
    active=0,
    waiting=0,
    waiting_capacity=4,
    slots=1,
    slots_used=0,
    paused=0,
    generated_tokens=0,
    prompt_tokens=0,
    kv_tokens_used=0,
    kv_tokens_capacity=0,
    kv_tokens_evicted=0,
)


def page() -> str:
    return PrometheusSink().expose(Gauges(models=(MODEL,), sink_events_dropped=0)).body.decode()


COUNTED = "(tokens(_evicted|_after_leaving)?|streams_(admitted|ended)|cancellations|dropped|records_evicted|refusals)"
UNITS = (
    r"(seconds|bytes|connections|tokens_per_second|streams|sequences|slots|slots_used|ready|tokens_used|"
    r"tokens_capacity|info)"
)


def test_every_metric_has_help_a_unit_and_a_name_by_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming/"""
    text = page()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.M))
    ours = {name: kind for name, kind in types.items() if not name.startswith("process_")}
    assert set(types) == set(helps)
    assert len(ours) == 35
    for name, kind in ours.items():
        assert re.fullmatch(r"tokenflow(_[a-z]+)+", name), name
        assert len(helps[name]) > 20, name
        assert helps[name].endswith("."), name
        if kind == "counter":
            assert re.search(f"_{COUNTED}_total$", name)
        else:
            assert re.search(f"_{UNITS}$", name), name
            assert not re.search(r"_(total|count|sum|bucket|gauge|histogram)$", name), name


def test_no_label_has_an_unbounded_set_of_values() -> None:
    text = page()
    labels = set(re.findall(r'[{,](\w+)="', text))
    assert labels == {"model", "le", "reason", "code", "phase", "by", "version", "python_version"}
    assert "_created" not in text
