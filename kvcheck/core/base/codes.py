"""Finding codes: meaning, usual cause, and sightings in serving engines.

Invariants:
- A published code keeps its meaning; scripts and baselines depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcheck.core.base.errors import UsageError

BUGS: Final = {
    "retract-resume": "a: what a retracted request gets back, and what is kept of a metadata slot",
    "hicache": "b: reads of a layer before the host tier has loaded it",
    "pd-transfer": "c: state lists of different lengths at the two ends of a transfer",
    "hicache-hybrid": "d: index lists that a prefix tree keeps, moved in place",
    "nvlink-aux": "e: done is published before the bytes have landed, and ranks disagree",
}


def bug_of(scenario: str) -> str:
    return BUGS.get(scenario, scenario)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    code: str
    title: str
    meaning: str
    usual_cause: str
    seen_in: str


def _code(code: str, title: str, meaning: str, usual_cause: str, seen_in: str) -> tuple[str, Code]:
    return code, Code(code=code, title=title, meaning=meaning, usual_cause=usual_cause, seen_in=seen_in)


CODES: dict[str, Code] = dict(
    (
        _code(
            "KV101",
            "stale bytes",
            "A read saw an older version of the reader's own data: an earlier state or an earlier attempt.",
            "A copy read its source before the last write, or a state was restored from an older save.",
            "Recurrent states restored one step behind; slots whose previous content was believed.",
        ),
        _code(
            "KV102",
            "foreign bytes",
            "A read saw bytes that another request wrote.",
            "A page or slot was reused while somebody still reads it, or a buffer was not saved and restored.",
            "SGLang #23346: the index buffer of an NSA pool was neither offloaded nor restored on retract.",
        ),
        _code(
            "KV103",
            "torn row",
            "One row holds words of several writes.",
            "A reader overtook a copy, or two writers overlap.",
            "Metadata whose fields arrive one by one while the slot is already read.",
        ),
        _code(
            "KV104",
            "never written",
            "A read saw memory that nobody had written since it was allocated.",
            "A length one too long, a layer or a buffer left out of a copy.",
            "SGLang #23346: resume counted one token more than had been committed.",
        ),
        _code(
            "KV105",
            "bit difference",
            "A read saw words that no writer of this run makes.",
            "Bytes went through arithmetic, a conversion, or a faulty link.",
            "Patterns passed through float conversion lose NaN payloads.",
        ),
        _code(
            "KV106",
            "misplaced bytes",
            "A read saw words that belong elsewhere: to another head, layer, buffer or word of the row.",
            "A copy with a wrong stride or offset, ranks that send the wrong heads, or a list of buffers or layers "
            "in another order at one end.",
            "No release yet; the words say which head, layer or buffer of which request they were written for.",
        ),
        _code(
            "KV201",
            "read before load",
            "A layer was read before it was loaded, or a page was backed up before it was computed.",
            "An accessor that does not wait, or waits for another layer, load or lane; a ring entry armed too early; "
            "an acknowledgement that leaves out a companion buffer.",
            "SGLang #22811: three index readers without the wait.",
        ),
        _code(
            "KV202",
            "reuse while in use",
            "A page or slot was freed or rewritten while an operation of its owner was pending.",
            "Pages freed before a copy was acknowledged; a prefix evicted on either tier while it is backed up or "
            "loaded; an abort that does not drain.",
            "Prefill still writing into pages that decode had freed after an abort.",
        ),
        _code(
            "KV203",
            "status before data",
            "A request or a copy was declared done before all of its bytes had landed.",
            "A completion that means 'sent', taken for 'visible'.",
            "SGLang #23252: status over TCP overtook NVLink bytes.",
        ),
        _code(
            "KV301",
            "wrong rows or length",
            "Two views of one request disagree on its length, or a row holds another position of its request.",
            "Lists trimmed on one side; lengths that count the uncommitted token; rows restored in another order than "
            "they were saved, as by sorted ids.",
            "SGLang #18727: state index lists of different lengths.",
        ),
        _code(
            "KV302",
            "wrong device",
            "An index or a buffer lies on a device it must not lie on.",
            "Index tensors moved in place.",
            "SGLang #23429: device tensors inside radix-tree nodes.",
        ),
        _code(
            "KV303",
            "shared value changed",
            "A value that must never change was changed after it had been handed over.",
            "In-place moves, trims or sorts of an index list that somebody else keeps; a cached prefix that keeps a "
            "view of a queue's ids.",
            "SGLang #23429: move_hybrid_indices.",
        ),
        _code(
            "KV304",
            "buffer not moved",
            "A save, restore or transfer left out a buffer of the pool's table.",
            "Parallel lists of buffers with an entry missing.",
            "SGLang #23346: index_k_with_scale; FP4 scales.",
        ),
        _code(
            "KV305",
            "aliasing",
            "A value that must be owned shares its storage with a buffer that will be reused.",
            "A slice returned where a copy was meant; a copy to the device it already lies on; one host page handed to "
            "two cached prefixes.",
            "SGLang #23346: metadata get_buf returned views of a recycled slot.",
        ),
        _code(
            "KV306",
            "undeclared access",
            "An operation touched memory that it does not declare, or declares rows that are not there.",
            "A copy whose index list and footprint are computed from different things; a staging buffer that several "
            "copies share.",
            "Found by the audit of footprints alone: one schedule in seven runs under it, the third of a cell first.",
        ),
        _code(
            "KV308",
            "call went wrong",
            "A call that has to be refused was let through, or changed something.",
            "A check that was left out or comes after a change; a bound that is off by one.",
            "No release yet; the next wrong caller then corrupts memory where it should have been stopped.",
        ),
        _code(
            "KV401",
            "leak",
            "Ids or bytes are still held after everything has finished.",
            "A path that frees some of the pools or buffers; a lock that is never released.",
            "SGLang #23346: the index buffer was not freed with its pool.",
        ),
        _code(
            "KV402",
            "double free",
            "An id was freed that was not allocated.",
            "Two owners of one page; a retract that frees pages the prefix tree owns.",
            "Host slots freed twice after a failed load-back.",
        ),
        _code(
            "KV403",
            "foreign write",
            "A request wrote to a page or slot that it does not own.",
            "Unequal index lists broadcast over each other; a stale index.",
            "SGLang #18727: two source pages written to one destination page.",
        ),
        _code(
            "KV501",
            "tokens differ",
            "A request's output differs from the reference run's.",
            "Any of the above that reached the model.",
            "Garbled text after retract and resume.",
        ),
        _code(
            "KV502",
            "logits differ",
            "Logits differ from the reference run's by more than the stated tolerance.",
            "Any of the above, or arithmetic in another order.",
            "Accuracy loss without a crash.",
        ),
        _code(
            "KV601",
            "ranks disagree",
            "Two ranks decided differently about one request.",
            "A decision taken from a rank's own poll.",
            "SGLang #23252: one rank committed, the other kept waiting.",
        ),
        _code(
            "KV602",
            "terminal state left",
            "A request left a terminal state.",
            "Failed overwritten by Success.",
            "Status tables that keep the larger number.",
        ),
        _code(
            "KV603",
            "reason does not fit",
            "A request failed as it had to, and its reason does not name what went wrong.",
            "An error that is noticed by its timeout alone, or a trim that hides it; the real reason stays in a log.",
            "SGLang before 0.5.17: what the transfer of states returned was ignored, and the room timed out.",
        ),
        _code(
            "KV604",
            "failed for nothing",
            "A request failed that nothing had been done to: no fault, no abort.",
            "Bytes written to another place than the peer checks; messages of one attempt that count for another.",
            "No release yet; users see it as requests that time out now and then.",
        ),
        _code(
            "KV605",
            "wrong report",
            "A scheduler or a cache reported what cannot follow its earlier reports, or what was not done.",
            "A report that is not renewed each round; an abort or a failure that is told to nobody; a counter that is "
            "raised in another place than where the thing happens.",
            "No release yet; users see it as requests that end twice or never, and as statistics that do not add up.",
        ),
        _code(
            "KV606",
            "step left out",
            "An end of a transfer did not send a message that was due, or did not clear a seal.",
            "A branch of a failure or an abort that returns before the peer is told. Repeats and time limits hide it: "
            "the request is only late, or fails and is sent again.",
            "No release yet; users see rooms that are freed minutes after their abort, and a few slow first tokens.",
        ),
        _code(
            "KV607",
            "room not used",
            "A scheduler let a request wait beside room for it, or left a round with room unused.",
            "A wrong count of free pages, rows or running requests; a batch that waits for what it does not use.",
            "No release yet; users see a lower throughput, and nothing else.",
        ),
        _code(
            "KV701",
            "victim out of order",
            "An eviction took a prefix that the declared order keeps longer than another one.",
            "An order that is read from the wrong end or from stale counts; a list of candidates that leaves some out.",
            "Mooncake #2976: what had just been written went before older pages that had been read.",
        ),
        _code(
            "KV702",
            "refused with room",
            "A backup, load, prefetch or state was given up although room was free or could be made.",
            "Room that is counted without what eviction would free; locks that are kept too long.",
            "SGLang #16370: a prefetch that did not fit was abandoned, whatever room was left.",
        ),
        _code(
            "KV703",
            "cached prefix lost",
            "What was computed is not cached under its hash, left unevicted, or is computed again.",
            "A match that is cut short, pages that are freed instead of kept, a last block that is left out.",
            "vLLM #48596: the last block was not offloaded, so that its hits were missed.",
        ),
        _code(
            "KV704",
            "copy not started",
            "A backup that the policy asks for, or a prefetch, never started or left something out.",
            "A use that is not counted, a branch that returns early, a failure that is taken for a refusal.",
            "SGLang #33714: prompts prefilled in chunks were never backed up; #27619: prefetches skipped under load.",
        ),
        _code(
            "KV705",
            "evicted for nothing",
            "An eviction went on after as much room was free as somebody had asked for.",
            "A count of what was freed that takes the other tier's number, or counts the last victim too late.",
            "No release yet; users see prefixes computed again that had room, and nothing else.",
        ),
        _code(
            "KV706",
            "copy held up",
            "A copy had run and was not acknowledged, loads left an engine idle, or a fetch kept failing.",
            "A round counted wrongly before finished copies are looked at; a failure that is forgotten.",
            "vLLM #49328: a request whose load failed was loaded again and again, and never scheduled.",
        ),
        _code(
            "KV801",
            "wrong token",
            "A running server answered another token than the known one.",
            "A page that is stale, foreign, at another position or lost in part; or a wrong sampler, which names none.",
            "A page left stale on purpose in a running SGLang 0.5.23: every request that hit it answered wrong.",
        ),
        _code(
            "KV802",
            "token of another request",
            "A running server answered what only another request can be answered.",
            "A page of another request in the table of this one, or answers that went to the wrong request.",
            "LMCache #4385, Mooncake #4153: answers that quote what another session had said.",
        ),
        _code(
            "KV803",
            "shifted answer",
            "A running server skipped or repeated tokens of the answer, the rest is right.",
            "A token that is counted, sent or kept twice or not at all, such as at a resume or where a draft is taken.",
            "No release yet; an answer that goes on one token early or late after it was resumed looks like this.",
        ),
        _code(
            "KV804",
            "answered after abort",
            "A request was answered to its end, long after its abort was acknowledged.",
            "An abort that misses a request in a queue, or one that was retracted and comes back.",
            "No release yet; tokens that were on their way and requests that ended at once are not counted.",
        ),
        _code(
            "KV805",
            "cached count that cannot be",
            "An engine counts more cached tokens than were sent before.",
            "A count that is kept over a retraction or taken from another request, or a page that was matched wrongly.",
            "Counters only: the answers can be right all the same.",
        ),
        _code(
            "KV806",
            "server lost under the run",
            "A server died or stopped answering while it was judged.",
            "A crash or a deadlock under eviction, retraction or transfer; its own log says which.",
            "SGLang 0.5.12: the first retract raised TypeError.",
        ),
        _code(
            "KV807",
            "unreadable answer",
            "The connection ended inside an answer, or what came is not the engine's format.",
            "A worker that died behind a router, or an error written into a stream.",
            "No release yet; a connection that ends after an abort is not counted.",
        ),
        _code(
            "KV808",
            "wrong length",
            "An answer ended early without a reason, or has more tokens than were asked for.",
            "Tokens counted twice, or not at all, at a retraction or a resume.",
            "No release yet; a request that does not fit into the server's length is not counted.",
        ),
        _code(
            "KV809",
            "crosstalk",
            "A running server answered tokens that were drawn for another request.",
            "A page of another request in the table of this one, or an answer that went to the wrong request.",
            "LMCache #4385, Mooncake #4153: answers that quote what another session had said.",
        ),
        _code(
            "KV810",
            "diverged beyond noise",
            "An answer lies further from the server's own cold answer than its noise explains.",
            "A page that is stale, foreign or lost in part; a scale or a position that is wrong after a restore. For a "
            "layer and a page, repeat with a known-answer model: kvcheck live URL --known-answers DIR.",
            "SGLang #34683: cold and warm answers of one server flip without a fault; a control of equal shapes tells.",
        ),
        _code(
            "KV811",
            "unlike the kept reference",
            "A build answers cold otherwise than the kept one did, beyond the noise of both.",
            "Another kernel or another rounding, which can be right; or an error of prefill or decode in one of both.",
            "SGLang #25790: decode and prefill in FP8 differ from one position on, with equal bytes.",
        ),
        _code(
            "KV901",
            "hang",
            "The run did not end within its step or time budget.",
            "A wait for something that nothing will do; a lost notification.",
            "A metadata gate without a timeout.",
        ),
        _code(
            "KV902",
            "crash",
            "The code under test raised or died.",
            "A contract that the code checks itself, or a plain bug.",
            "SGLang 0.5.12: the first retract raised TypeError.",
        ),
        _code(
            "KV990",
            "not exercised",
            "The run ended without touching what it was meant to judge.",
            "A pool too large, a workload too small, a missing capability.",
            "Cache benchmarks that never hit the cache.",
        ),
    )
)


def code(name: str) -> Code:
    found = CODES.get(name.upper())
    if found is None:
        raise UsageError(f"unknown code {name!r}; known: {', '.join(CODES)}")
    return found
