"""Gates against exact fractions, and answers of servers that the test decides."""

import contextlib
import json
import socket
import sys
import threading
from decimal import Decimal, getcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import exact_match, miniature_runs
from sglang_aiter_moe.evaluation.miniature_runs import Asked, Run, Setting, to_json
from sglang_aiter_moe.miniature import WEIGHTS, task
from sglang_aiter_moe.serving.sglang_python import SGLang
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.sglang_server import ServerDied

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def below(count, total, share):
    """P(X < count), term by term from the empty one, in 40 digits."""
    share = Decimal(share)
    term, found = (1 - share) ** total, Decimal(0)
    for k in range(count):
        found += term
        term *= share / (1 - share) * (total - k) / (k + 1)
    return found


@pytest.mark.parametrize("right, many", [(4000, 4000), (3987, 4000), (1000, 1000), (180, 200)])
def test_a_right_server_fails_as_seldom_as_stated_and_the_gate_is_as_high_as_that_allows(
    right, many
):
    getcontext().prec = 40
    gate = exact_match.gate(right, many, 200)
    # the lowest share that `right` of `many` leaves open, by bisection
    low, high, half = Decimal(0), Decimal("0.9999999"), Decimal(exact_match.FALSE_ALARM) / 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - below(right, many, middle) < half else (low, middle)
    assert below(gate.required, 200, low) <= half
    assert below(gate.required + 1, 200, low) > half


def test_the_gates_of_the_shipped_weights():
    required = {
        (name, mode): exact_match.gate_of(WEIGHTS / name, mode, 200).required
        for name, mode in (
            ("kimi", "A16W4"),
            ("kimi", "A8W4"),
            ("kimi", "A4W4"),
            ("gpt_oss", "A16W4"),
            ("kimi_second", "A16W4"),
        )
    }
    assert required["kimi", "A16W4"] >= 194 and required["kimi", "A8W4"] >= 194
    assert required["kimi", "A4W4"] >= 190
    assert required["gpt_oss", "A16W4"] >= 194 and required["kimi_second", "A16W4"] >= 194


def test_a_server_that_is_wrong_in_one_answer_of_ten_is_seldom_let_through():
    gate = exact_match.gate(3987, 4000, 200)
    assert gate.misses_broken < 0.01
    assert gate.misses_broken == pytest.approx(float(1 - below(gate.required, 200, "0.9")))


@pytest.mark.parametrize("right, questions", [(0, 200), (10, 0)])
def test_no_gate_without_answers_or_questions(right, questions):
    with pytest.raises(ContractError, match="questions"):
        exact_match.gate(right, 20, questions)


@pytest.mark.parametrize("right, few, enough", [(4000, 1, 2), (3987, 2, 3)])
def test_no_gate_for_so_few_questions_that_noise_passes(right, few, enough):
    with pytest.raises(ContractError, match=f"^{few} questions need 0 right answers"):
        exact_match.gate(right, 4000, few)
    assert exact_match.gate(right, 4000, enough).required == 1


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        code, answer = self.server.reply(self.path, body)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *arguments):
        pass  # a client that did not wait


@pytest.fixture
def server():
    made = Server(("127.0.0.1", 0), Handler)
    made.bodies, made.daemon_threads = [], True
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_only_the_whole_answer_counts(server):
    questions = task.held_out_questions(30)
    known = {q.text: q.answer for q in questions}
    flawed = {q.text for q in questions[:7]}

    def reply(path, body):
        text = known[body["prompt"]]
        if body["prompt"] in flawed:  # the result is right, a step is not
            text = (
                text.replace(" plus ", " minus ")
                if " plus " in text
                else text.replace("minus", "plus")
            )
        return 200, {"choices": [{"text": f" {text} "}]}

    server.reply = reply
    given = exact_match.answers(server.url, questions)
    assert exact_match.count_right(given, questions) == 23
    for path, body in server.bodies:
        assert path == "/v1/completions" and body["temperature"] == 0
        question = next(q for q in questions if q.text == body["prompt"])
        # room for the answer and its end mark, within the positions that the model has
        assert body["max_tokens"] >= len(question.answer.split()) + 1
        assert len(question.text.split()) + body["max_tokens"] <= task.LENGTH


def test_a_refused_question_is_no_wrong_answer(server):
    server.reply = lambda path, body: (400, {"message": "too long"})
    with pytest.raises(ContractError, match="too long"):
        exact_match.ask(server.url, task.held_out_questions(1)[0])


def test_a_refused_update_is_an_error(server, tmp_path):
    server.reply = lambda path, body: (400, {"success": False, "message": "shape"})
    with pytest.raises(ContractError, match="shape"):
        exact_match.update_weights(server.url, tmp_path)
    assert server.bodies == [("/update_weights_from_disk", {"model_path": str(tmp_path)})]


def test_a_server_that_is_gone_or_silent_is_no_wrong_answer(server, tmp_path):
    (question,) = task.held_out_questions(1)
    done = threading.Event()
    server.reply = lambda path, body: (done.wait(20), (200, {}))[1]
    with pytest.raises(ContractError, match="no answer: timed out"):
        exact_match.ask(server.url, question, timeout=0.2)
    done.set()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ContractError, match=r"no answer: .*refused"):
            exact_match.ask(url, question)
        with pytest.raises(ContractError, match=r"no answer: .*refused"):
            exact_match.update_weights(url, tmp_path)


def test_a_server_that_does_not_start_is_refused_and_its_log_shown(monkeypatch, tmp_path):
    @contextlib.contextmanager
    def serving(*arguments, **options):
        raise ServerDied("exit status 1\nTraceback\nImportError: sgl_kernel")
        yield

    monkeypatch.setattr(miniature_runs, "serving", serving)
    said = []
    sglang = SGLang(tmp_path / "python", "0.5.20")
    with pytest.raises(ContractError, match=r"kimi, A8W4, SGLang 0.5.20.*: exit status 1") as found:
        miniature_runs.run(Setting(mode="A8W4"), sglang, tmp_path, say=said.append)
    assert str(tmp_path / "kimi-A8W4-0.5.20.log") in found.value.fix
    assert "ImportError: sgl_kernel" in said[-1]


def asked(right, other=0, name="kimi", empty=0):
    return Asked(name, right, exact_match.gate(4000, 4000, 200), ("a", "b"), other, empty)


@pytest.mark.parametrize(
    "setting, answered, holds",
    [
        (Setting(), [asked(200)], True),
        (Setting(), [asked(195)], True),
        (Setting(), [asked(194)], False),
        (Setting(update=True), [asked(200), asked(194, name="kimi_second"), asked(200)], False),
        # right answers and some in the other checkpoint's words: weights that were replaced in part
        (Setting(update=True), [asked(200), asked(199, 1, "kimi_second"), asked(200)], False),
        (Setting(wrong_layout=True), [asked(39)], True),
        (Setting(wrong_layout=True), [asked(40)], False),
        # a server that says nothing is no noise: something else than the layout is wrong
        (Setting(wrong_layout=True), [asked(0, empty=99)], True),
        (Setting(wrong_layout=True), [asked(0, empty=100)], False),
        (Setting(plugin=False), [asked(0)], True),  # reported, not judged
    ],
)
def test_what_holds(setting, answered, holds):
    run = Run(setting, "0.5.23", answered)
    assert run.holds is holds
    report = to_json([run])
    assert report["holds"] is holds
    (row,) = report["modes"] + report["wrong_layout"] + report["without_plugin"]
    assert row["accuracy"] == answered[0].right / 200 and row["questions"] == 200


def test_answers_without_a_word_and_in_the_other_ones_words_are_counted(server):
    questions = task.held_out_questions(30)
    said = {q.text: q.answer for q in questions}
    said[questions[1].text] = "  "
    said[questions[2].text] = questions[2].answer.replace("answer", "result")
    server.reply = lambda path, body: (200, {"choices": [{"text": said[body["prompt"]]}]})
    found = miniature_runs._ask(server.url, "kimi", "A16W4", 30)
    assert (found.right, found.empty, found.other_dialect) == (28, 1, 1)
    updated = to_json([Run(Setting(update=True), "0.5.23", [found, found])])["modes"][0]
    assert updated["empty"] == 1 and updated["updates"][0]["other_dialect"] == 1


@pytest.mark.parametrize(
    "fields, layout",
    [
        ({}, "separated"),
        ({"mode": "A8W4"}, "gu_interleaved"),
        ({"mode": "A4W4"}, "separated"),
        ({"mode": "A8W4", "wrong_layout": True}, "separated"),
        ({"wrong_layout": True}, "gu_interleaved"),
        ({"ranks": 2}, "separated"),
        ({"plugin": False}, "as released"),
        ({"model": "gpt_oss"}, "gu_interleaved"),
    ],
)
def test_layouts_are_named(fields, layout):
    assert Setting(**fields).layout == layout


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
