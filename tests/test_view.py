"""The per-step view: runners-up and remasking in a step, the trace, the terminal, and the page that replays it all."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import math
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import unmask
from unmask.cli import run
from unmask.cli._terminal import draw_news, draw_row
from unmask.cli._trace import tracing
from unmask.data.tokenizers import Bytes, load_tokenizer
from unmask.errors import UnmaskError, UsageError
from unmask.model import Model
from unmask.reporting.replay import Page
from unmask.samplers import RunnersUp, Sampler, State, Step
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.block import Block
from unmask.samplers.confidence import Confidence
from unmask.samplers.drawing import Drawing
from unmask.samplers.left_to_right import LeftToRight
from unmask.samplers.posterior import Posterior
from unmask.samplers.refine import Refine
from unmask.samplers.remdm import ReMDM
from unmask.samplers.semi_ar import SemiAR
from unmask.sampling.canvas import Canvas
from unmask.sampling.observe import step_as_dict
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about
from unmask.text.prompts import until_end

Capture = pytest.CaptureFixture[str]
BYTES = load_tokenizer("bytes")
V, M = 5, 5  # ids 0..4 and the mask


def table(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
    """Logits that differ by position and by how much is still masked."""
    B, L = z_BL.shape
    position_L = torch.arange(L)[:, None]
    left_B = (z_BL == M).sum(dim=1)[:, None, None]
    return torch.cos(position_L * 1.7 + torch.arange(V + 1) * 2.3).expand(B, L, V + 1) * (1 + 0.2 * left_B)


NETWORK = unmask.as_denoiser(table, vocab_size=V, mask_id=M)
SAMPLERS: list[Sampler] = [
    Ancestral(steps=4),
    Ancestral(steps=None, temperature=0.5, top_k=2),
    LeftToRight(),
    Posterior(steps=3),
    SemiAR(window=4, stride=2, inner=Ancestral(steps=3)),
    Block(size=3, inner=Confidence()),
    SemiAR(window=4, stride=2, inner=Block(size=2)),
    ReMDM(steps=6),
    SemiAR(window=4, stride=4, inner=ReMDM(steps=6)),
    Refine(rounds=2, share=0.5),
    Refine(rounds=1, share=0.5, inner=SemiAR(window=4, stride=2, inner=Ancestral(steps=3))),
]


# --- runners-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_each_step_tells_the_networks_runners_up(sampler: Sampler) -> None:
    """The prediction for the canvas before the step, at the very position; the draws are those of an unwatched run."""
    canvas = Canvas.of(torch.tensor([[M] * 8, [0, M, M, 1, M, M, M, 2], [M, 3, M, M, M, M, 4, M]]), mask_id=M, seed=7)
    before = canvas.tokens
    exact = sampler.planned or isinstance(sampler, Posterior)  # of others a step does not tell what the network saw
    plain = list(unmask.steps(NETWORK, canvas, sampler))
    watched = list(unmask.steps(NETWORK, canvas, sampler, runners_up=2))
    assert len(plain) == len(watched)
    for quiet, step in zip(plain, watched, strict=True):
        assert quiet.others is None
        assert quiet.tokens_BL.equal(step.tokens_BL)
        assert quiet.log_prob_N.equal(step.log_prob_N)
        assert step.others is not None
        assert step.others.token_NK.shape == (len(step.row_N), 2)
        assert step.remasked is not None
        # what was written before and opens now was masked again in between
        masked_again = (before != M) & (step.tokens_BL == M).index_put(
            (step.row_N, step.position_N), torch.tensor(True)
        )
        assert torch.stack(step.remasked, dim=1).equal(masked_again.nonzero())
        for n, (row, position) in enumerate(zip(step.row_N.tolist(), step.position_N.tolist(), strict=True)):
            if exact:
                logits = table(before[row : row + 1], None)[0, position, :V]
                p = torch.softmax(logits, dim=0)
                assert float(step.others.prob_N[n]) == pytest.approx(float(p[step.token_N[n]]), abs=1e-6)
                p[step.token_N[n]] = -1
                assert step.others.token_NK[n].tolist() == p.topk(2).indices.tolist()
                assert step.others.prob_NK[n].tolist() == pytest.approx(p.topk(2).values.tolist(), abs=1e-6)
            assert int(step.token_N[n]) not in step.others.token_NK[n].tolist()
        before = step.tokens_BL


def test_what_is_masked_again_between_two_calls_is_told() -> None:
    canvas = Canvas.of(torch.tensor([[0, 1, 2, 3, 0, 1]]), mask_id=M, seed=1)
    canvas = dataclasses.replace(canvas, draft_BL=torch.ones(1, 6, dtype=torch.bool))
    told = list(unmask.steps(NETWORK, canvas, Refine(rounds=2, share=0.5, inner=LeftToRight()), runners_up=1))
    again = [0 if step.remasked is None else len(step.remasked[0]) for step in told]
    opened = [len(step.row_N) for step in told]
    assert sum(again) == sum(opened) == 6  # three tokens in each of two rounds
    assert max(again) == 3  # told at once, with the first of them that opens


def test_no_more_runners_up_than_there_are_tokens_and_no_fewer_than_none() -> None:
    canvas = Canvas.blank(num=1, length=2, mask_id=M)
    for step in unmask.steps(NETWORK, canvas, LeftToRight(), runners_up=99):
        assert step.others is not None
        assert step.others.token_NK.shape[1] == V
        assert float(step.others.prob_NK.sum() + step.others.prob_N.sum()) == pytest.approx(1, abs=1e-5)
    with pytest.raises(UsageError, match="runners_up must be 0"):
        list(unmask.steps(NETWORK, canvas, LeftToRight(), runners_up=-1))


def test_a_constrained_step_tells_what_the_network_would_have_had(model: Model) -> None:
    seen: list[Step] = []
    model.fill("x[MASK:3]", constraint=unmask.constraints.Choices(options=("zzz",)), watch=seen.append, runners_up=3)
    for step in seen:
        assert step.log_prob_N.exp().tolist() == pytest.approx([1.0] * len(step.row_N))
        assert step.others is not None
        assert (step.others.prob_NK[:, 0] > step.others.prob_N).all()  # the corpus has no z


def test_an_autoregressive_model_tells_too(ar_model: Model) -> None:
    seen: list[Step] = []
    text = ar_model.generate(num=3, length=12, prompt="the ", watch=seen.append, runners_up=2)
    assert text == ar_model.generate(num=3, length=12, prompt="the ")
    assert len(seen) == 8
    for step in seen:
        assert step.others is not None
        # nothing is cut or heated: only the mask and what is never written are left out of the law
        assert step.log_prob_N.exp().tolist() == pytest.approx(step.others.prob_N.tolist(), rel=1e-3)


@dataclass(frozen=True, kw_only=True)
class Fickle(Drawing, Sampler):
    """Opens from left to right and masks the first token again, once: after its second call."""

    tells: bool = True

    def max_calls(self, length: int) -> int:
        return length + 1

    def ask(self, state: State) -> Query | None:
        masked_BL = state.tokens_BL == M
        first_BL = masked_BL & (masked_BL.cumsum(dim=1) == 1)
        state.query = ask_about(state.canvas, state.tokens_BL, first_BL, torch.ones(1))
        return state.query

    def write(self, state: State, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        step = super().write(state, opens_N, token_N, log_prob_N)
        if state.round != 2:
            return step
        state.tokens_BL = state.tokens_BL.index_put((step.row_N, torch.tensor([0])), torch.tensor(M))
        again = (step.row_N, torch.tensor([0])) if self.tells else None
        return replace(step, tokens_BL=state.tokens_BL, remasked=again)


@pytest.mark.parametrize("tells", [True, False])
def test_what_was_masked_again_is_told(tells: bool) -> None:
    """By the sampler or, where it does not, by looking; windows shift it with the rest."""
    canvas = Canvas.blank(num=1, length=4, mask_id=M)
    found = [step.remasked for step in unmask.steps(NETWORK, canvas, Fickle(tells=tells), runners_up=1)]
    told = [(r[0].tolist(), r[1].tolist()) for r in found if r is not None]
    assert told == [([], []), ([0], [0]), ([], []), ([], []), ([], [])]
    canvas = Canvas.of(torch.tensor([[M, M, M, M, M, M, M, M]]), mask_id=M)
    for runners_up in (0, 1):
        windows = SemiAR(window=4, stride=4, inner=Fickle(tells=True))
        steps = list(unmask.steps(NETWORK, canvas, windows, runners_up=runners_up))
        again = [s.remasked[1].tolist() for s in steps if s.remasked is not None and len(s.remasked[1])]
        assert again == [[0], [4]]
        assert steps[1].tokens_BL[0, 0] == M
        assert M not in steps[-1].tokens_BL


# --- the trace --------------------------------------------------------------------------------------------------------


def test_the_trace_has_one_line_a_step_and_the_text_in_it(trained: Any, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("old\n", encoding="utf-8")
    words = ["generate", str(trained.folder), "--num", "2", "--length", "20", "--prompt", "the ", "--seed", "4"]
    assert run([*words, "--device", "cpu", "--json", "--trace", str(file)]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert texts == trained.model.generate(num=2, length=20, prompt="the ", seed=4)  # watching changes nothing
    lines = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    rows = [{}, {}]
    for line in lines:
        assert line.keys() == {
            *("step", "row", "position", "token", "text", "log_prob", "model_prob", "others", "remasked")
        }
        for row, position, token, text, log_prob, others in zip(
            *(line[key] for key in ("row", "position", "token", "text", "log_prob", "others")), strict=True
        ):
            assert position not in rows[row]
            rows[row][position] = token
            assert trained.model.tokenizer.token_text(token) == text
            assert log_prob <= 0
            assert len(others) == 4
            assert [o["model_prob"] for o in others] == sorted((o["model_prob"] for o in others), reverse=True)
        assert line["remasked"] == []
    assert all(sorted(row) == list(range(4, 20)) for row in rows)
    for row, text in zip(rows, texts, strict=True):
        written = until_end([row[i] for i in range(4, 20)], trained.model.tokenizer)
        assert trained.model.tokenizer.decode([*b"the ", *written]) == text


def a_step(**changes: Any) -> Step:
    one = torch.tensor([0])
    return replace(Step(one, one, torch.tensor([104]), torch.tensor([-0.5]), torch.tensor([[104, 257]])), **changes)


def test_a_trace_can_be_followed_and_holds_what_came_before_an_error(tmp_path: Path) -> None:
    file = tmp_path / "t"
    with pytest.raises(RuntimeError, match="stop"), tracing(BYTES, str(file)) as trace:  # noqa: PT012
        assert trace is not None
        trace(a_step())
        assert json.loads(file.read_text(encoding="utf-8"))["text"] == ["h"]  # there while it runs
        trace(a_step(log_prob_N=torch.tensor([-math.inf]), remasked=(torch.tensor([0]), torch.tensor([1]))))
        raise RuntimeError("stop")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["log_prob"] == [None]  # JSON has no infinity
    assert lines[1]["remasked"] == [[0, 1]]
    assert "others" not in step_as_dict(a_step(), 1, BYTES)
    with pytest.raises(UnmaskError, match="cannot write"), tracing(BYTES, str(tmp_path)):
        pass
    with tracing(BYTES, None) as nothing:
        assert nothing is None


# --- the terminal -----------------------------------------------------------------------------------------------------


def test_the_terminal_shows_probabilities_and_what_was_masked_again() -> None:
    others = RunnersUp(torch.tensor([[105, 256]]), torch.tensor([[0.25, 0.125]]), torch.tensor([0.5]))
    news = draw_news(a_step(others=others), BYTES).plain
    assert news.split() == ["'h'", "60.7%", "network:", "itself", "50.0%,", "'i'", "25.0%,", "'<|endoftext|>'", "12.5%"]
    many = torch.zeros(5, dtype=torch.long)
    step = a_step(row_N=many, position_N=torch.arange(5), token_N=many + 104, log_prob_N=many.float())
    assert draw_news(step, BYTES).plain.endswith("and 2 more")
    row = draw_row([104, 257, 257], BYTES, set(), {0}, {2})
    console = Console(force_terminal=True, color_system="standard", width=40, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.capture() as seen:
        console.print(row)
    console.file.close()
    assert "\x1b[2m░" in seen.get()
    assert "\x1b[31m░" in seen.get()


# --- the page ---------------------------------------------------------------------------------------------------------

NASTY = "</script><img src=x onerror=\"document.title='broken'\"><!-- & \u2028 ]]>"


class Nasty(Bytes):
    """Bytes, but two of them are spelled as an attack."""

    def token_text(self, id: int) -> str:
        return NASTY if id in (104, 105) else super().token_text(id)


def a_page() -> Page:
    page = Page(Nasty())
    others = RunnersUp(torch.tensor([[105, 256]]), torch.tensor([[0.25, 0.125]]), torch.tensor([0.5]))
    first, second = torch.tensor([[104, 257, 257], [97, 257, 256]]), torch.tensor([[104, 98, 257], [97, 257, 256]])
    one = torch.tensor([0])
    page(Step(one, one, torch.tensor([104]), torch.tensor([-0.5]), first, None, others))
    page(Step(one, one + 1, torch.tensor([98]), torch.tensor([-0.1]), second, None, others))
    third = torch.tensor([[257, 98, 99], [97, 100, 256]])
    rows, positions, tokens = torch.tensor([0, 1]), torch.tensor([2, 1]), torch.tensor([99, 100])
    page(Step(rows, positions, tokens, torch.tensor([-0.1, 0.0]), third, (one, one), None))
    last = torch.tensor([[105, 98, 99], [97, 100, 256]])
    page(Step(one, one, torch.tensor([105]), torch.tensor([-0.5]), last, None, others))
    return page


def test_masks_behind_an_end_of_text_are_closed_on_the_page() -> None:
    """A row that has ended leaves: the network is not asked about the rest, and the page shows no masks for it."""
    page = Page(BYTES)
    one = torch.tensor([0])
    page(Step(one, one, torch.tensor([104]), torch.tensor([-0.5]), torch.tensor([[104, 257, 257, 257]])))
    page(Step(one, one + 1, torch.tensor([256]), torch.tensor([-0.5]), torch.tensor([[104, 256, 256, 256]])))
    assert page.data()["steps"][1]["opened"] == [
        [0, 1, 256, 0.6065, None, None],
        [0, 2, 256, None, None, None],
        [0, 3, 256, None, None, None],
    ]


class Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts[self.found[-1][0] if self.found else ""] = data


def test_the_page_is_whole_small_and_safe() -> None:
    text = a_page().html()
    elements = Elements()
    elements.feed(text)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 2
    assert "img" not in tags  # the token is data, not an element
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(tags)
    for _, attrs in elements.found:
        assert not {"src", "href", "style", "srcset", "action"} & attrs.keys()
        assert not [name for name in attrs if name.startswith("on")]
    assert not re.search(r"https?://|//[a-z]|@import|url\(|innerHTML|insertAdjacent|document\.write|eval", text)
    policy = next(a["content"] for t, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    empty = Page(BYTES).html()
    assert len(empty.encode()) < 60_000
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    data = json.loads(block[1])
    assert data["words"]["104"] == NASTY
    assert data["rows"] == [[257, 257, 257], [97, 257]]  # as given, without the padding of the shorter row
    assert data["steps"][2]["remasked"] == [[0, 0]]
    assert data["steps"][0]["opened"] == [[0, 0, 104, 0.6065, 0.5, [[105, 0.25], [256, 0.125]]]]
    assert "@DATA@" not in text
    assert "@CSP@" not in text


def in_browser(page: Path, hash: str = "") -> str:
    """What the page looks like after its script ran."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if chromium is None:
        pytest.skip("NO BROWSER: the replay page was NOT looked at; install chromium to run this test")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=8000", "--dump-dom", f"{page.as_uri()}{hash}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def spans(dom: str) -> list[tuple[str, str]]:
    """Class and text of every token shown."""
    inside = re.search(r'<div id="text".*?>(.*?)</div>', dom, re.DOTALL)
    assert inside is not None
    found = re.findall(r'<span[^>]*?class="([^"]*)"[^>]*>(.*?)</span>', inside[1], re.DOTALL)
    return [(kind, html.unescape(text)) for kind, text in found]


def test_the_page_replays_in_a_browser(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    a_page().save(file)
    dom = in_browser(file)
    assert spans(dom) == [("open", NASTY), ("open", "b"), ("open", "c")]
    assert "step 4 of 4, 0 masks left" in dom
    assert "<img" not in dom.replace(html.escape("<img"), "")
    assert "<title>unmask: a text in 4 steps</title>" in dom
    dom = in_browser(file, "#step=2&by=sure&position=1")
    assert spans(dom) == [("open chosen", NASTY), ("open new", "b"), ("mask", "")]
    assert "step 2 of 4, 1 mask left" in dom
    assert 'class="by-sure"' in dom
    about = re.search(r'<section id="about".*?</section>', dom, re.DOTALL)
    assert about is not None
    assert "drawn with probability 60.7%" in about[0]
    assert re.findall(r"<td>(\S+%)</td>", about[0]) == ["50.0%", "25.0%", "12.5%"]
    assert "end of text" in about[0]
    dom = in_browser(file, "#step=3&position=1")  # masked again
    assert spans(dom)[0] == ("mask again chosen", "")
    assert "masked again in step 3" in dom
    dom = in_browser(file, "#step=0&row=2")
    assert spans(dom) == [("given", "a"), ("mask", "")]


ACTIONS = """<script>
const press = (key, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const where = () => document.getElementById("where").textContent, log = [];
press("ArrowLeft"); log.push(where());
press("Home"); log.push(where());
press("ArrowLeft"); press("ArrowRight"); log.push(where());
const token = document.querySelector("#text [role=button]");
log.push(token.tabIndex); token.focus(); press("ArrowRight", token);
log.push(document.activeElement === document.querySelectorAll("#text [role=button]")[1]);
log.push(document.getElementById("about").textContent);
document.querySelector("#text [role=button]").dispatchEvent(new MouseEvent("mouseenter"));
log.push(document.getElementById("about").textContent.slice(0, 11));
document.querySelector("input[value=sure]").click(); log.push(document.getElementById("text").className);
const row = document.getElementById("row"); row.selectedIndex = 1; row.dispatchEvent(new Event("change"));
log.push(document.querySelectorAll("#text span").length);
press(" "); log.push(document.getElementById("play").textContent);
setTimeout(() => { log.push(where(), document.getElementById("play").textContent);
  document.title = JSON.stringify(log); }, 5000);
</script>"""


def test_keys_pointer_and_buttons_of_the_page(tmp_path: Path) -> None:
    """Driven from within: a copy without its policy, which would not let a second script run."""
    file = tmp_path / "page.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", a_page().html())
    file.write_text(text.replace("</body>", ACTIONS + "</body>"), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", in_browser(file), re.DOTALL)
    assert title is not None
    assert json.loads(html.unescape(title[1])) == [
        "step 3 of 4, 1 mask left",
        "step 0 of 4, 3 masks left",
        "step 1 of 4, 2 masks left",
        0,
        True,
        "Position 2: still masked.",
        "Position 1:",
        "by-sure",
        2,
        "Pause",
        "step 4 of 4, 0 masks left",
        "Play",
    ]


def test_the_commands_write_the_page(trained: Any, tmp_path: Path, capsys: Capture) -> None:
    for words in (
        ["generate", "--length", "16", "--num", "2"],
        ["generate", "--length", "24", "--num", "3", "--sampler", "remdm", "--steps", "12", "--eta", "0.5"],
        ["fill", "the [MASK:2..3] sat", "a [MASK:5]"],
        ["edit", "--text", "the cat sat", "--replace", "cat"],
    ):
        file = tmp_path / f"{words[0]}.html"
        picture, trace = tmp_path / f"{words[0]}.svg", tmp_path / f"{words[0]}.jsonl"
        outputs = ["--html", str(file), "--svg", str(picture), "--trace", str(trace)]
        assert run([words[0], str(trained.folder), *words[1:], *outputs, "--device", "cpu"]) == 0
        block = re.search(r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"), re.DOTALL)
        assert block is not None
        data = json.loads(block[1])
        assert len(data["steps"]) == len(trace.read_text(encoding="utf-8").splitlines())
        opened, again = (sum(len(step[key]) for step in data["steps"]) for key in ("opened", "remasked"))
        assert opened - again == sum(row.count(257) for row in data["rows"])
        assert (again > 0) == ("remdm" in words)
        assert picture.is_file()
    capsys.readouterr()
    for flag in ("--html", "--svg", "--trace"):
        bad = ["generate", str(trained.folder), "--length", "8", flag, str(tmp_path / "none" / "x"), "--device", "cpu"]
        assert run(bad) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("unmask: cannot write ")
        assert err.count("\n") == 1
