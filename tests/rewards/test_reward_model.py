import pytest
import torch
from models import random_llama
from test_rewards import group, section
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

from grpo_cli.rewards import Rules, score


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A random classifier of three classes with the tokenizer of the random language model."""
    source, folder = random_llama(tmp_path_factory.mktemp("lm")), tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source, num_labels=3, id2label={0: "bad", 1: "so-so", 2: "good"})
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def rule(folder, label="good", **settings):
    return {"fn": "classifier", "args": {"path": str(folder), "label": label, "batch_size": 2}, **settings}


def probability(folder, text, label):
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer([text], return_tensors="pt")).logits.softmax(dim=1)[0, label].item()


def test_a_classifier_scores_prompt_and_completion_whatever_the_batch(classifier):
    texts = ["12", "a longer one: 1234567", "", "5+6=11"]
    with Rules(section({"liked": rule(classifier)}, "liked"), "cpu") as rules:
        found = score(rules, [group(*texts)]).rule_PG["liked"][0].tolist()
    assert found == pytest.approx([probability(classifier, f"7+5={text}", 2) for text in texts], abs=1e-6)


def test_a_classifier_stands_beside_other_rules_and_behind_a_gate(classifier):
    rules = {"accuracy": {"fn": "numeric"}, "liked": rule(classifier, weight=2, gate="accuracy")}
    right, wrong = "<answer>12</answer>", "<answer>13</answer>"
    with Rules(section(rules, "accuracy"), "cpu") as loaded:
        scores = score(loaded, [group(right, wrong)])
    liked = probability(classifier, f"7+5={right}", 2)
    assert scores.total_PG[0].tolist() == pytest.approx([1 + 2 * liked, 0], abs=1e-6)


def test_as_a_process_rule_it_scores_each_step_by_what_stands_before_its_end(classifier):
    steps = rule(classifier, kind="process", split="\n")
    with Rules(section({"accuracy": {"fn": "numeric"}, "steps": steps}, "accuracy"), "cpu") as rules:
        scores = score(rules, [group("1+2=3\n\n3+4=7", "x")])
    first, second = (probability(classifier, f"7+5={text}", 2) for text in ("1+2=3", "1+2=3\n\n3+4=7"))
    assert [end for end, _ in scores.steps_B[0] if end > 0] == [5, 12]
    assert [reward for end, reward in scores.steps_B[0] if end > 0] == pytest.approx([first, second], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "great"}, r"args\.label=great names none of its classes \(0: bad, 1: so-so, 2: good\)"),
        ({"label": None}, "names none of its classes"),
        ({"path": "/nowhere"}, r"reward\.rules\.liked: args\.path=/nowhere holds no sequence-classification model"),
        ({"paht": "x"}, "unexpected keyword argument 'paht'"),
    ],
)
def test_a_classifier_that_cannot_be_loaded_is_refused(classifier, changes, message):
    broken = rule(classifier)
    broken["args"] |= changes
    with pytest.raises(ValueError, match=message):
        Rules(section({"liked": broken}, "liked"), "cpu")


def test_a_language_model_is_no_classifier(model_folder):
    with pytest.raises(ValueError, match="lacks weights of a classifier"):
        Rules(section({"liked": rule(model_folder, label=0)}, "liked"), "cpu")


def test_a_model_cannot_be_a_gate(classifier):
    with pytest.raises(ValueError, match=r"accuracy\.gate=liked is a model"):
        Rules(section({"liked": rule(classifier), "accuracy": {"fn": "numeric", "gate": "liked"}}, "accuracy"), "cpu")
