"""The Grafana dashboard asks for what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scraping import ANYWHERE, scrape
from support.served import generate, rest, serving

ROOT = Path(__file__).resolve().parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/chairlift.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    yield from (v["query"]["query"] for v in BOARD["templating"]["list"] if v["type"] == "query")


async def test_every_query_names_metrics_and_labels_that_a_scrape_has() -> None:
    async with serving(**ANYWHERE) as served:
        await rest(served.generation.Generate(generate(5, 6)))
        samples = await scrape(served)
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, {"job", "instance"}).update(key for key, _ in pairs)
    for query in queries():
        names = re.findall(r"\bchairlift_\w+", query)
        assert names, query
        assert set(names) <= labels.keys(), query
        grouped = {label for group in re.findall(r"by \(([\w, ]+)\)", query) for label in group.split(", ")}
        assert grouped <= set.union(*(labels[name] for name in names)), query


@pytest.mark.parametrize("query", list(queries()))
def test_the_brackets_of_every_query_match(query: str) -> None:
    open_brackets = []
    for character in re.sub(r'"[^"]*"', "", query):
        if character in "([{":
            open_brackets.append({"(": ")", "[": "]", "{": "}"}[character])
        elif character in ")]}":
            assert open_brackets.pop() == character
    assert not open_brackets


def test_counters_are_shown_as_rates_and_quantiles_are_taken_of_buckets() -> None:
    for query in queries():
        for name in re.findall(r"chairlift_\w+_(?:total|bucket|sum|count)\b", query):
            is_whole = name == "chairlift_worker_restarts_total" or name.endswith("blocks_total")
            assert is_whole or f"rate({name}{{" in query, query
        assert ("histogram_quantile" in query) == ("_bucket" in query), query


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
