"""Reports of literal records. `python tests/report/test_report.py --regenerate` writes tests/golden/ anew."""

from __future__ import annotations

import base64
import csv
import errno
import gzip
import hashlib
import io
import json
import os
import re
import sys
import threading
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from rigs.literal_record import FAILED, FOREIGN, MARKUP, MUTANTS, PASSED, UNJUDGED
from rigs.live_record import LIVE, LIVE_PASSED
from typer.testing import CliRunner

from kvcheck.commands.report import report
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, RunRecord, Verdict, read_record
from kvcheck.core.report import WRITERS
from kvcheck.core.report.cards import cards_of
from kvcheck.core.report.to_csv import combined, tables
from kvcheck.core.report.to_html import render
from kvcheck.core.run.store import RunStore, find_run, write_text

GOLDEN = Path(__file__).parents[1] / "golden"
APP = typer.Typer()
APP.command()(report)


@cache
def golden_files() -> dict[str, str]:
    """File name under tests/golden/ to the text it must hold."""
    return {"run.json": FAILED.to_json(), "combined.csv": combined(FAILED), **tables(FAILED)} | {
        "live-combined.csv": combined(LIVE),
        "live-observed.csv": tables(LIVE)["observed.csv"],
    }


class Page(HTMLParser):
    """Start tags of a page, its ids, its text, and whether every tag that opens is closed in order."""

    VOID = frozenset({"meta", "input", "br", "use", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style", "template"} & {*self.open}:
            self.texts.append(data)

    def text(self) -> str:
        """What a reader sees, with single spaces."""
        return " ".join("".join(self.texts).split())

    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.tags if "id" in attrs]


def page_record(page: str) -> object:
    """What the download button would save."""
    found = re.search(r'<template id="record" data-encoding="(\w+)"[^>]*>(.*?)</template>', page, re.DOTALL)
    assert found is not None
    encoding, text = found.groups()
    return json.loads(text if encoding == "json" else gzip.decompress(base64.b64decode(text)))


def many_findings() -> RunRecord:
    codes = ("KV104", "KV102", "KV201")
    rows = (replace(FOREIGN, id=f"{n}", page=n % 90, layer=n % 7, code=codes[n % 3]) for n in range(1000))
    return replace(FAILED, findings=tuple(rows))


@pytest.mark.parametrize("name", sorted(golden_files()))
def test_golden(name: str) -> None:
    assert golden_files()[name] == (GOLDEN / name).read_bytes().decode("utf-8")


@pytest.mark.parametrize(
    "record",
    [FAILED, PASSED, UNJUDGED, many_findings(), LIVE, LIVE_PASSED],
    ids=["fail", "pass", "unknown", "1000", "server", "server-pass"],
)
def test_page_is_whole_self_contained_and_small(record: RunRecord) -> None:
    text = render(record)
    page = Page(text)
    assert page.open == []
    assert len(page.ids()) == len(set(page.ids()))
    assert [tag for tag, _ in page.tags].count("script") == 1
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert "src" not in attrs
        for name in ("href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#")
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert len(text.encode()) < 300_000
    assert page_record(text) == json.loads(record.to_json())


@pytest.mark.parametrize("record", [FAILED, LIVE], ids=["fail", "server"])
def test_page_shows_each_finding_cell_and_count_of_the_record(record: RunRecord) -> None:
    seen = Page(render(record)).text()
    wanted = [record.run_id, record.repro, *record.warnings]
    for finding in record.findings:
        wanted += [finding.code, finding.message, finding.replay, finding.condition]
    for row in record.scenarios:
        wanted += [row.id.partition("/")[0], row.shape, row.reason]
        wanted += [f"{count:,}" for count in row.evidence.words_verified.values()]
        wanted += [f"{count:,}" for count in row.evidence.observed.values()]
    for mutant in record.mutants:
        wanted += [mutant.name, mutant.killer]
    missing = [each for each in wanted if each and " ".join(each.split()) not in seen]
    assert not missing


def test_policy_allows_the_one_script_by_its_hash() -> None:
    text = render(PASSED)
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    policy = next(attrs["content"] for _, attrs in Page(text).tags if "http-equiv" in attrs)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_markup_from_outside_stays_text_everywhere() -> None:
    hostile = replace(
        FAILED,
        run_id=MARKUP,
        tool={MARKUP: MARKUP},
        repro=MARKUP,
        started_at=MARKUP,
        plan={MARKUP: [MARKUP]},
        warnings=(MARKUP, "</template></style>"),
        evidence=replace(FAILED.evidence, words_verified={MARKUP: 3, "$x^2$ & co": 2}),
        findings=(
            replace(FOREIGN, id=MARKUP, code=MARKUP, oracle=MARKUP, scenario=MARKUP, shape=MARKUP, tier=MARKUP),
            replace(FOREIGN, buffer=MARKUP, lane=MARKUP, message=MARKUP, replay=MARKUP, minimal={MARKUP: MARKUP}),
        ),
        mutants=(replace(MUTANTS[1], name=MARKUP, bug=MARKUP, killer=MARKUP, message=MARKUP, replay=MARKUP),),
    )
    text = render(hostile)
    assert MARKUP not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in text
    assert [tag for tag, _ in Page(text).tags].count("script") == 1
    assert page_record(text) == json.loads(hostile.to_json())


EMPTY = replace(UNJUDGED, scenarios=(), evidence=Evidence())
FOUND = replace(MUTANTS[0], verdict=Verdict.PASS)
BANNERS = {
    "the worst finding": (FAILED, "KV102 foreign bytes: request 7 resumed"),
    "its line": (FAILED, "kvcheck replay &#39;kv1:retract-resume/glm-5.1-tiny:12:0.3.1.4&#39;"),
    "the reason of an unknown": (UNJUDGED, "no retraction in 200 schedules"),
    "an empty run is no pass": (EMPTY, "No scenario ran, so nothing was judged. This is not a pass."),
    "the mutant that survived": (replace(FAILED, findings=()), "metadata-read-returns-view: survived"),
    "a failure without a finding": (replace(FAILED, findings=(), mutants=()), "retract-resume/glm-5.1-tiny: KV102"),
    "mutants that were judged": (
        replace(PASSED, scenarios=(), mutants=(FOUND, replace(FOUND, name="b"))),
        "Judged: 2 mutants, 2 found",
    ),
}


@pytest.mark.parametrize("name", BANNERS)
def test_the_banner_shows(name: str) -> None:
    record, shown = BANNERS[name]
    assert shown in render(record).split("<main>")[0]


def test_a_card_is_a_likely_cause_of_all_its_cells_with_its_tables_and_the_notes_come_last() -> None:
    cells = [("a", "KV102"), ("b", "KV102"), ("b", "KV104"), ("c", "KV301"), (MARKUP, "KV301")]
    findings = [
        replace(FOREIGN, id=f"{at}", shape=shape, code=code, buffer=f"{code}-buffer", layer=at, schedule=f"x:y={at}")
        for at, (shape, code) in enumerate(cells)
    ]
    findings += [replace(FOREIGN, id="9", shape="d", code="KV103", condition=MARKUP)]
    text = render(replace(FAILED, findings=tuple(findings)))
    order = [text.index(f'<section id="{name}">') for name in ("findings", "conditional", "json", "notes")]
    assert order == sorted(order) and MARKUP not in text
    cards = text[order[0] : order[1]].split('<article class="finding"')[1:]
    assert len(cards) == 2 == len([each for each in cards_of(findings) if not each.is_conditional])
    for card, cell, second, captions in zip(cards, "ac", ("b", ""), (["KV102", "KV104"], ["KV301"]), strict=True):
        assert f"<dt>cells</dt><dd>retract-resume/{cell}, retract-resume/{second}" in card
        assert card.count("<tr><td>") == len(captions) and re.findall(r"<caption>(\w+)-buffer", card) == captions
        assert card.count('<div class="matrices">') == 1
    folded = text[order[1] : order[2]].partition("</section>")[0]
    assert folded.count("<li>") == 1 and "KV103 retract-resume/d: 1 conditional finding" in folded
    assert "<details>" in folded and 'id="conditional"' not in render(FAILED)


def test_symptoms_are_counted_and_folded_into_their_cause() -> None:
    symptom = replace(FOREIGN, id="9", code="KV501", oracle="output", message="token 3 differs", cause="1")
    text = render(replace(FAILED, findings=(FOREIGN, symptom, replace(symptom, id="10", code="KV601"))))
    assert text.count('<article class="finding"') == 1
    folded = text.split("<summary>2 other findings of this card</summary>")[1].split("</details>")[0]
    assert "token 3 differs" in folded and "KV601" in folded


def test_what_does_not_apply_is_not_zero() -> None:
    text = render(UNJUDGED)
    assert "<tr><th>seed</th><td>n/a</td></tr>" in text
    assert "0 retractions" not in text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        *((f"{start}1+1", f"'{start}1+1") for start in ("=", "+", "-", "@", "\t", "\n", "\n=", " =")),
        *((f"{start}1+1", f"'{start}1+1") for start in ("\u00a0=", "\ufeff=", "\u200b@", "\u2060+", "\u3000-")),
        *((f"{start}1+1", f"'{start}1+1") for start in ("\uff1d", "\uff0b", "\uff0d", "\uff20", "\ufe66")),
        ("\r1+1", "'\n1+1"),
        ("1+1", "1+1"),
        ("a\x1b[31m\x07\x9b31m\x7fb\tc\nd", "a\\x1b[31m\\x07\\x9b31m\\x7fb\tc\nd"),  # steers no terminal
        *(("a\rb", "a\nb"), ("a\r\nb", "a\nb"), ("a\nb", "a\nb"), ('a"b', 'a"b'), ("a,b", "a,b")),
    ],
)
def test_csv_text_is_no_formula_and_stays_in_its_cell(message: str, shown: str) -> None:
    text = tables(replace(FAILED, findings=(replace(FOREIGN, message=message, row=-1),)))["findings.csv"]
    (row,) = csv.DictReader(io.StringIO(text, newline=""))
    assert (row["message"], row["row"]) == (shown, "-1")


def test_csv_of_an_empty_run_has_its_columns() -> None:
    empty = replace(EMPTY, evidence=Evidence(words_verified={"latent": 4}))
    found = tables(empty)
    assert found["findings.csv"].startswith("run_id,id,code,oracle,") and found["findings.csv"].count("\n") == 1
    assert found["words.csv"].splitlines()[1] == f"{empty.run_id},,,latent,4"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=["read-only", "full", "denied"])
def test_a_refused_write_keeps_the_old_file(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old")

    def refuse(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UsageError, match=rf"cannot write .*run\.json: {os.strerror(number)}; .*--out DIR"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "there.json", tmp_path / "link.json"
    link.symlink_to("real/there.json")
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert [entry.name for entry in (tmp_path / "real").iterdir()] == ["there.json"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_text()), daemon=True)
    reader.start()
    write_text(path, "text")
    reader.join(10)
    assert got == ["text"] and path.is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot write .*file.*--out DIR"):
        RunStore(tmp_path / "file").save(PASSED)


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "/root"])
def test_a_run_id_is_a_plain_name(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one plain file name"):
        RunStore(tmp_path).folder(run_id)


def test_arguments_that_are_not_utf_8_survive(tmp_path: Path) -> None:
    odd = replace(PASSED, argv=("kvcheck", b"\xff".decode("utf-8", "surrogateescape")))
    path = RunStore(tmp_path).save(odd)
    assert read_record(path) == odd
    WRITERS.load("html")(odd, tmp_path / "page.html")
    assert page_record((tmp_path / "page.html").read_text(encoding="utf-8")) == json.loads(odd.to_json())


def test_runs_are_found_by_id_prefix_folder_and_file(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    paths = [store.save(record) for record in (FAILED, PASSED)]
    assert store.run_ids() == (FAILED.run_id, PASSED.run_id)
    for name in (FAILED.run_id, "20260102-030405", str(paths[0]), str(paths[0].parent)):
        assert find_run(name, store.out).resolve() == paths[0].resolve()
    with pytest.raises(UsageError, match=r"ambiguous.*0c4e.*0c4f"):
        find_run("2026", store.out)
    with pytest.raises(UsageError, match="did you mean '20260102-030405-0c4e'"):
        find_run("20260102-030495-0c4e", store.out)
    with pytest.raises(UsageError, match="holds no runs; make one with `kvcheck stress`"):
        find_run("x", tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no run ''"):
        find_run("", store.out)


def test_report_writes_beside_the_record_and_prints_the_paths(tmp_path: Path) -> None:
    path = RunStore(tmp_path).save(FAILED)
    result = CliRunner().invoke(APP, [FAILED.run_id[:20], "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [str(path.parent / "report.html"), str(path.parent / "*.csv")]
    assert (path.parent / "findings.csv").read_text(encoding="utf-8") == tables(FAILED)["findings.csv"]
    assert read_record(path) == FAILED


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-o", "html"], "expected FORMAT=PATH"),
        (["-o", "hmtl=x"], "did you mean 'html'"),
        (["-o", "html=x.html", "-o", "html=x.html"], "two reports would be written"),
        (["MISSING"], "no run 'MISSING'"),
    ],
)
def test_report_refuses_before_it_writes(options: list[str], complaint: str, tmp_path: Path) -> None:
    path = RunStore(tmp_path).save(PASSED)
    result = CliRunner().invoke(APP, [str(path), *options, "--out", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert re.search(complaint, str(result.exception))
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


def test_report_of_several_runs_stays_in_its_folder(tmp_path: Path) -> None:
    names = [str(RunStore(tmp_path / "runs").save(record)) for record in (FAILED, PASSED)]
    evil = Path(names[1])
    evil.write_text(evil.read_text(encoding="utf-8").replace(PASSED.run_id, "../evil"), encoding="utf-8")
    result = CliRunner().invoke(APP, [*names, "-o", f"json={tmp_path / 'json'}"])
    assert isinstance(result.exception, UsageError)
    assert "run id '../evil' cannot name a folder" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_matrix_has_one_column_an_oracle_and_says_what_was_not_run() -> None:
    killed = replace(MUTANTS[0], killer="aliasing", killed_by="aliasing KV305")
    other = replace(killed, name="b", outcome="killed-by-other", killed_by="liveness KV901", verdict=Verdict.FAIL)
    code = replace(other, name="c", killed_by="aliasing KV306")
    survived = replace(killed, name="d", outcome="survived", killed_by=None, verdict=Verdict.FAIL)
    not_begun = replace(killed, name="e", outcome="not-begun", killed_by=None, schedules=0, verdict=Verdict.UNKNOWN)
    unused = replace(not_begun, name="f", outcome="not-exercised", schedules=9)
    page = render(replace(PASSED, scenarios=(), mutants=(killed, other, code, survived, not_begun, unused)))
    table = page[page.index('<section id="mutants">') : page.index('<section id="environment">')]
    assert re.findall("<th>(aliasing.*?|liveness.*?)</th>", table) == ["aliasing", "liveness"]
    rows = [re.findall('data-label="(?:aliasing|liveness)">(.*?)</td>', row) for row in table.split("<tr>")[2:]]
    told = ["K", ""], ["missed", "K"], ["other code", ""], ["missed", ""], ["not run", ""], ["not judged", ""]
    assert sorted(rows) == sorted(told)


if __name__ == "__main__":
    assert sys.argv[1:] == ["--regenerate"], "usage: python tests/report/test_report.py --regenerate"
    for golden_name, golden_text in golden_files().items():
        write_text(GOLDEN / golden_name, golden_text)
