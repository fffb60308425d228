"""What `conf/` has for Grafana and Prometheus: each metric, label and value that it names is one that a server shows; a
real Prometheus evaluates all of it, and has something to show for it; each alert comes when it should, and alone.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import trio

from tests.e2e.proxies import REPLICA, Replicas, binary, free_port, replicas, running
from tests.e2e.wire import COMPLETIONS, PATIENCE_S, ask, completion, connect, directive, metric, post, until_metric

CONF = Path(__file__).parents[2] / "conf"
DASHBOARD = json.loads((CONF / "grafana" / "tokenflow.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
ALERTS = (CONF / "prometheus" / "alerts.yml").read_text()
RULES = dict(re.findall(r"- alert: (\w+)\n +expr: (?:>-\n)?(.+?)\n +for:", ALERTS, re.S))
ENDED = "tokenflow_streams_ended_total"


def asked(expression: str) -> str:
    """As Grafana asks for it, with everything selected."""
    for variable, value in {"$model": ".*", "$instance": ".*", "$__rate_interval": "1m"}.items():
        expression = expression.replace(variable, value)
    return expression


EXPRESSIONS = [asked(target["expr"]) for target in TARGETS]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(tmp_path_factory.mktemp("replicas"), REPLICA) as servers:
        yield servers


@pytest.fixture(scope="module")
def page(servers: Replicas) -> str:
    """What a server shows after a while."""

    async def shown() -> str:
        await live(servers.a.port)
        return (await ask(servers.a.port, "GET", "/metrics")).body.decode()

    return trio.run(shown)


async def live(port: int) -> None:
    """A stream that ends well, one that fails, something that is no request, and last a reader who leaves."""
    left = await metric(port, ENDED, reason="disconnected")
    for prompt in "hello", directive(raise_at=2):
        await post(port, COMPLETIONS, completion(prompt, max_tokens=3))
    async with connect(port) as wire:
        await wire.stream.send_all(b"nonsense\r\n\r\n")
        await wire.closed()
    async with connect(port) as wire:
        await wire.open(COMPLETIONS, completion("hello", max_tokens=1000))
        await wire.until(3)
    await until_metric(port, left + 1, ENDED, reason="disconnected")


# --- names ------------------------------------------------------------------------------------------------------------


def series(page: str) -> dict[str, list[dict[str, str]]]:
    """By name, the labels of each as Prometheus has them."""
    target = {"instance": "a", "job": "tokenflow"}
    found = {"up": [target]}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", page, re.M):
        found.setdefault(name, []).append(target | dict(re.findall(r'(\w+)="(.*?)"', labels)))
    return found


def unknown(expression: str, page: str) -> set[str]:
    """What the expression selects and nothing on the page is, and what it groups by and nothing there has."""
    missing, known = set(), set()
    for name, selector in re.findall(r"\b(up|(?:tokenflow|process)_\w+)\b(?:\{(.*?)\})?", expression):
        its = series(page).get(name, [])
        known |= {label for has in its for label in has}
        matchers = [(label, value.split("|")) for label, value in re.findall(r'(\w+)=~?"(.*?)"', selector)]
        for values in product(*(values for _, values in matchers)):
            wanted = dict(zip((label for label, _ in matchers), values, strict=True))
            if not any(matches(has, wanted) for has in its):
                missing.add(f"{name} {wanted}")
    return missing | (grouped(expression) - known)


def matches(has: dict[str, str], wanted: dict[str, str]) -> bool:
    return all(label in has and re.fullmatch(value, has[label]) for label, value in wanted.items())


def grouped(expression: str) -> set[str]:
    """The labels by which it groups or joins."""
    return {
        label for group in re.findall(r"\b(?:by|on|group_left) \((.*?)\)", expression) for label in group.split(", ")
    }


def test_all_that_is_named_is_shown(page: str) -> None:
    variables = [asked(variable["query"]) for variable in DASHBOARD["templating"]["list"]]
    for expression in (*EXPRESSIONS, *RULES.values(), *variables):
        assert unknown(expression, page) == set()
    for name in re.findall(r"\btokenflow_\w+", ALERTS):
        assert re.search(rf"^(# TYPE )?{name}\b", page, re.M), name


def test_what_is_renamed_is_missed(page: str) -> None:
    for expression in (*EXPRESSIONS, *RULES.values()):
        for name in re.findall(r"\b(?:tokenflow|process)_\w+", expression):
            assert unknown(expression, page.replace(name, f"{name}s"))
        for label in grouped(expression) - {"instance"}:
            assert unknown(expression, page.replace(f'{label}="', f'{label}s="'))


def test_legends_and_messages_name_labels_that_are_there(page: str) -> None:
    for target in TARGETS:
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped(target["expr"]), target
    for rule in ALERTS.split("- alert: ")[1:]:
        expression = RULES[rule.split("\n")[0]]
        own = {label for name in re.findall(r"\w+", expression) for has in series(page).get(name, []) for label in has}
        assert set(re.findall(r"\$labels\.(\w+)", rule)) <= (grouped(expression) or own), rule


# --- the dashboard ----------------------------------------------------------------------------------------------------


def test_panels_have_ids_of_their_own_and_overlap_nowhere() -> None:
    cells = [cell for panel in DASHBOARD["panels"] for cell in covered(**panel["gridPos"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def covered(x: int, y: int, w: int, h: int) -> Iterator[tuple[int, int]]:
    return product(range(x, x + w), range(y, y + h))


def test_panels_say_what_they_show_out_of_the_data_source_that_is_chosen() -> None:
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert "unit" in panel["fieldConfig"]["defaults"] or panel["type"] == "state-timeline"
        ids = [target["refId"] for target in panel["targets"]]
        assert len(ids) == len(set(ids))


# --- a real Prometheus ------------------------------------------------------------------------------------------------


@pytest.fixture
def prometheus(servers: Replicas, tmp_path: Path) -> Iterator[int]:
    """With the example's configuration, but for ports and patience; its port."""
    program, port = binary("prometheus"), free_port()
    text = (CONF / "prometheus" / "prometheus.yml").read_text()
    changes = {":8001": f":{servers.a.port}", ":8002": f":{servers.b.port}", "interval: 15s": "interval: 100ms"}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / "alerts.yml").write_text(ALERTS)
    listen = f"--web.listen-address=127.0.0.1:{port}"
    with running([program, "--config.file=prometheus.yml", listen, "--storage.tsdb.path=data"], tmp_path, port):
        yield port


async def api(port: int, path: str, **query: str) -> Any:
    answer = (await ask(port, "GET", f"/api/v1/{path}?{urlencode(query)}")).json
    assert answer["status"] == "success", (query, answer)
    return answer["data"]


async def value(port: int, expression: str) -> list[float]:
    """Of each series in the result, what is a number."""
    result = (await api(port, "query", query=expression))["result"]
    return [number for series in result if not isnan(number := float(series["value"][1]))]


async def test_prometheus_has_something_to_show_for_each_expression(prometheus: int, servers: Replicas) -> None:
    await until(lambda: ready(prometheus))
    await until(lambda: value(prometheus, "sum(up) == 2"))  # it takes five seconds to look for what there is to scrape
    await live(servers.a.port)
    await until(lambda: value(prometheus, f'sum(rate({ENDED}{{reason="disconnected"}}[1m])) > 0'))
    for expression in EXPRESSIONS:
        assert await value(prometheus, expression), expression
    assert {rule["name"]: rule["health"] for rule in await rules(prometheus)} == dict.fromkeys(RULES, "ok")


async def until(found: Callable[[], Awaitable[Any]]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not await found():
            await trio.sleep(0.02)


async def ready(port: int) -> bool:
    return (await ask(port, "GET", "/-/ready")).status == 200


async def rules(port: int) -> list[Any]:
    return [rule for group in (await api(port, "rules"))["groups"] for rule in group["rules"]]


# --- alerts -----------------------------------------------------------------------------------------------------------

WELL = {'tokenflow_streams_ended_total{code="",model="m",reason="stop"}': "0+100x60"}
FIRES = {
    "TokenflowDown": {'up{job="tokenflow"}': "0x60"},
    "TokenflowNotReady": {'tokenflow_model_ready{model="m"}': "0x60"},
    "TokenflowEngineFails": {'tokenflow_streams_ended_total{code="engine_stuck",model="m",reason="error"}': "0+1x60"},
    "TokenflowStreamsFail": {'tokenflow_streams_ended_total{code="draining",model="m",reason="error"}': "0+10x60"},
    "TokenflowFirstTokenLate": {
        'tokenflow_time_to_first_token_seconds_bucket{model="m",le="10.0"}': "0+9x60",
        'tokenflow_time_to_first_token_seconds_bucket{model="m",le="20.0"}': "0+10x60",
        'tokenflow_time_to_first_token_seconds_bucket{model="m",le="+Inf"}': "0+10x60",
    },
    "TokenflowManyWait": {
        'tokenflow_waiting_streams{model="m"}': "49x60",
        'tokenflow_waiting_capacity_streams{model="m"}': "64x60",
    },
    "TokenflowRefuses": {'tokenflow_refusals_total{reason="queue_full"}': "0+1x60"},
    "TokenflowWorksForNobody": {
        'tokenflow_tokens_after_leaving_total{model="m"}': "0+9x60",
        'tokenflow_cancellations_total{by="client",model="m",phase="decode"}': "0+1x60",
    },
    "TokenflowLosesRecords": {"tokenflow_sink_events_dropped_total": "0x20 1x40"},
    "TokenflowDescriptorsRunOut": {
        'process_open_fds{job="tokenflow"}': "81x60",
        'process_max_fds{job="tokenflow"}': "100x60",
    },
}
"""What makes each come, minute by minute, beside streams that end well."""
QUIET = {
    'up{job="tokenflow"}': "1 0 1x60",
    'tokenflow_model_ready{model="m"}': "0 0 1x60",
    'tokenflow_streams_ended_total{code="engine_error",model="m",reason="error"}': "0 1x60",
    'tokenflow_time_to_first_token_seconds_bucket{model="m",le="10.0"}': "0+10x60",
    'tokenflow_time_to_first_token_seconds_bucket{model="m",le="+Inf"}': "0+10x60",
    'tokenflow_waiting_streams{model="m"}': "0 64 64 48x60",
    'tokenflow_waiting_capacity_streams{model="m"}': "64x60",
    'tokenflow_refusals_total{reason="queue_full"}': "0 9x60",
    'tokenflow_tokens_after_leaving_total{model="m"}': "0+2x60",
    'tokenflow_cancellations_total{by="client",model="m",phase="decode"}': "0+1x60",
    "tokenflow_sink_events_dropped_total": "0x60",
    'process_open_fds{job="tokenflow"}': "50x60",
    'process_max_fds{job="tokenflow"}': "100x60",
}
"""A day as any other: a restart, a request that fails, a rush that passes."""


def promtool(*arguments: str | Path, given: str = "") -> str:
    """What it says; it must be content."""
    done = subprocess.run([binary("promtool"), *arguments], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_finds_no_fault(page: str) -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "config", CONF / "prometheus" / "prometheus.yml")
    assert promtool("check", "metrics", given=page) == ""


def test_each_alert_comes_when_it_should_and_alone(tmp_path: Path) -> None:
    assert set(FIRES) == set(RULES)
    scenes = [scene("", QUIET), *(scene(alert, values) for alert, values in FIRES.items())]
    tests = {"rule_files": [str(CONF / "prometheus" / "alerts.yml")], "tests": scenes}
    (tmp_path / "alerts.json").write_text(json.dumps(tests))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "alerts.json")


def scene(alert: str, values: dict[str, str]) -> dict[str, Any]:
    """promtool's test that after half an hour just this alert fires; without a name, that none ever does."""
    fires: dict[str, Any] = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})'}
    fires |= {"exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": its} for name, its in (WELL | values).items()],
        "promql_expr_test": [fires | {"eval_time": f"{at}m"} for at in ([30] if alert else range(60))],
    }
