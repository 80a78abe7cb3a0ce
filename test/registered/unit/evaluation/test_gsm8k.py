"""GSM8K: which number an answer is read as, what is asked, and what a failing server does to a score."""

import json
import sys
from decimal import Decimal

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.evaluation import gsm8k
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.scripted_server import ScriptedServer

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9 * 2 = 18 dollars.\n#### 18", 18),
        ("#### 18\n\nThat took 3 steps.", 18),
        ("so 1,234,567 in all.\n#### 1,234,567", 1234567),
        ("It fell by 5.\n#### -5", -5),
        ("It costs $18.00", 18),
        ("It costs $2.50.", Decimal("2.5")),
        ("The answer is 7", 7),
        ("3 apples and 4 pears make 7.", 7),
        ("####", None),
        ("#### none, though 3 were there", 3),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_the_number_an_answer_ends_with(text, number):
    assert gsm8k.final_number(text) == number


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "test.jsonl"
    rows = [
        {"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_worked_examples_are_not_asked_again(data):
    questions = gsm8k.read_questions(data)
    texts = gsm8k.prompts(questions, 3, shots=2)
    assert [text.splitlines()[-2] for text in texts] == [
        f"Question: What is {n} plus {n}?" for n in (2, 3, 4)
    ]
    assert all(text.endswith("\nAnswer:") for text in texts)
    assert all(text.count("####") == 2 for text in texts)  # the examples' own solutions alone


def test_what_goes_on_after_the_answer_does_not_count(data):
    question = gsm8k.read_questions(data)[3]
    reply = gsm8k.judge(question, " 3 + 3 = 6\n#### 6\n\nQuestion: what is 7 plus 7?\nAnswer: 14")
    assert reply.right and "14" not in reply.text
    assert not gsm8k.judge(question, " 3 + 3 = 7\n#### 7").right
    assert gsm8k.judge(question, " six").value is None


def doubled(prompt, error=0):
    number = int(prompt.rpartition("What is ")[2].split()[0])
    return f" {number} + {number} = {2 * number + error}\n#### {2 * number + error}"


def test_a_server_is_asked_and_scored(data):
    questions = gsm8k.read_questions(data)
    wrong_once = lambda prompt: doubled(prompt, error="What is 7 plus 7?\nAnswer:" in prompt)  # noqa: E731
    counts = []
    with ScriptedServer(wrong_once) as server:
        score = gsm8k.score(server.url + "/v1/", questions, 7, shots=5, progress=counts.append)
    assert (score.right, len(score.replies), score.model) == (6, 7, "scripted")
    assert [reply.right for reply in score.replies] == [True, True, False, True, True, True, True]
    assert counts == [1, 2, 3, 4, 5, 6, 7]
    assert 6 / 7 in score.interval
    sent = server.requests[0]
    assert sent["temperature"] == 0 and len(sent["stop"]) <= 4 and sent["model"] == "scripted"


def test_two_runs_are_compared_question_by_question(data, tmp_path):
    questions = gsm8k.read_questions(data)
    with ScriptedServer(doubled) as good, ScriptedServer(lambda p: doubled(p, error=1)) as bad:
        first = gsm8k.score(good.url, questions, 7, label="A8W4")
        second = gsm8k.score(bad.url, questions, 7, label="A4W4")
    found = gsm8k.compare(first, second)
    assert (found.only_first, found.only_second) == (7, 0)
    assert found.p_value == pytest.approx(2 / 2**7)
    path = tmp_path / "first.json"
    path.write_text(json.dumps({"scores": [first.to_json()]}))
    assert gsm8k.compare(gsm8k.read_score(path), second) == found
    with ScriptedServer(doubled) as good:
        other = gsm8k.score(good.url, questions, 7, shots=4)
    with pytest.raises(ContractError, match="A8W4 answered 7 questions"):
        gsm8k.compare(first, other)


def test_a_failed_request_is_no_wrong_answer(data):
    questions = gsm8k.read_questions(data)
    fails = lambda prompt: None if "What is 8 plus" in prompt else doubled(prompt)  # noqa: E731
    with ScriptedServer(fails) as server, pytest.raises(ContractError, match=r"500: .*out of"):
        gsm8k.score(server.url, questions, 7)


def test_no_server_is_said(data):
    with pytest.raises(ContractError, match="refused"):
        gsm8k.score("http://127.0.0.1:9", gsm8k.read_questions(data), 2)


def test_the_file_is_fetched_once(data, tmp_path):
    cached = gsm8k.fetch_questions(tmp_path / "cache", data.as_uri())
    assert cached.read_bytes() == data.read_bytes()
    assert gsm8k.fetch_questions(tmp_path / "cache", "file:///nowhere") == cached
    with pytest.raises(ContractError, match="cannot be fetched"):
        gsm8k.fetch_questions(tmp_path / "other", "file:///nowhere")


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"question": "?"}', '{"question": "?", "answer": "no"}']
)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "?", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ContractError, match="line 2"):
        gsm8k.read_questions(path)


def test_more_questions_than_lines_are_refused(data):
    with pytest.raises(ContractError, match="8 questions and 5 worked"):
        gsm8k.prompts(gsm8k.read_questions(data), 8, shots=5)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
