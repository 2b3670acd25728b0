# ruff: noqa: RUF001 (signs that look like others are tested here)
import json
import threading
import time
from pathlib import Path

import pytest

from grpo_cli.records import Ended, Problem, Sample
from grpo_cli.rewards.mathematics import math
from grpo_cli.rewards.rules import NOT_APPLICABLE

SHARED = Path(__file__).parents[2] / "../shared"
CASES = SHARED / "cases/math.jsonl"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared cases and data sets are not beside this checkout")


def sample(text, gold) -> Sample:
    return Sample(Problem("p", "?", gold), "?", text, 9, Ended.eos)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@needs_shared
@pytest.mark.parametrize("case", read(CASES), ids=lambda case: case["id"])
def test_shared_case(case):
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math(sample(case["completion"], case["gold"]))))
    thread.start()
    thread.join(20)
    assert verdicts == [math(sample(case["completion"], case["gold"]))] == [float(case["correct"])], case["why"]


# (answer as it stands in a box, gold, right)
BOXED = [
    # numbers
    ("42", "42", True),
    ("42.0", "42", True),
    ("+42", "42", True),
    ("042", "42", True),
    ("42,000", "42000", True),
    ("42{,}000", "42000", True),
    (r"42,\!000", "42000", True),
    (r"42\,000", "42000", True),
    ("42 000 000", "42,000,000", True),
    ("42,00", "4200", False),
    ("42.000", "42000", False),
    ("４２", "42", True),  # full-width digits
    ("1,234,567.25", "1234567.25", True),
    (".5", r"\frac12", True),
    ("0.3333", r"\frac{1}{3}", False),
    ("0.333333333333333333333333333333", r"\frac{1}{3}", False),
    (r"0.\overline{3}", r"\frac{1}{3}", True),
    (r"0.1\overline{6}", r"\frac{1}{6}", True),
    (r"0.\overline{6}", r"\frac{1}{3}", False),
    ("0.333\\ldots", r"\frac{1}{3}", False),
    ("3.14", r"\pi", False),
    ("3.14159265358979", r"\pi", False),
    (r"\frac{22}{7}", r"\pi", False),
    (r"\pi \approx 3.14", r"\pi", True),
    (r"x \approx 3.14", r"\pi", False),
    (r"\approx 3.14", r"\pi", False),
    ("0.500000001", "0.5", False),
    ("1.000000001", "1", False),
    ("123456789012345678901234567890", "123456789012345678901234567891", False),
    ("123456789012345678901234567891", "123456789012345678901234567891", True),
    ("1" + "0" * 60 + "1", "1" + "0" * 61, False),
    (r"10^{61}", "1" + "0" * 61, True),
    ("-0.0", "0", True),
    ("--5", "-5", False),
    ("−5", "-5", True),  # U+2212
    ("–5", "-5", True),  # an en dash in front of a number
    (r"\text{-5}", "-5", True),
    ("1/0", "1", False),
    (r"\frac{1}{0}", "0", False),
    # scientific
    ("3e5", "300000", True),
    ("3.2E-3", "0.0032", True),
    (r"3.2\cdot10^{-3}", "0.0032", True),
    ("3.2 x 10^5", "320000", True),
    ("3.2×10⁵", "320000", True),
    (r"3.2\times 10^{6}", "320000", False),
    (r"1.00000001 \times 10^{-9}", "1e-9", False),
    ("2^{10}", "1024", True),
    ("2^{-100}", r"\frac{1}{2^{100}}", True),
    (r"10^{-30}\pi", r"2\cdot10^{-30}\pi", False),
    # fractions, mixed numbers, roots
    (r"\frac12", "0.5", True),
    (r"\frac 59", r"\frac{5}{9}", True),
    (r"\frac9{19}", "9/19", True),
    (r"\dfrac{3}{-4}", "-0.75", True),
    ("-3/4", r"-\frac{3}{4}", True),
    ("3/4", r"\frac43", False),
    ("1 1/2", r"\frac{3}{2}", True),
    (r"1\frac{1}{2}", "1.5", True),
    (r"-1\frac12", "-1.5", True),
    (r"-1\frac12", "-0.5", False),
    ("2½", "2.5", True),
    ("½", "0.5", True),
    (r"\frac{\frac{1}{2}}{3}", r"\frac16", True),
    (r"\sqrt{8}", r"2\sqrt2", True),
    ("2√2", r"\sqrt{8}", True),
    ("sqrt(8)", r"2\sqrt2", True),
    ("2.828427", r"2\sqrt2", False),
    (r"\sqrt[3]{-8}", "-2", True),
    (r"8^{1/3}", "2", True),
    (r"(1+\sqrt5)/2", r"\frac{1+\sqrt{5}}{2}", True),
    (r"\frac{1-\sqrt5}{2}", r"\frac{1+\sqrt{5}}{2}", False),
    (r"\log_2 8", "3", True),
    (r"\ln e^2", "2", True),
    (r"\sin 30^\circ", r"\frac12", True),
    (r"\cos\frac{\pi}{3}", "0.5", True),
    (r"\binom{5}{2}", "10", True),
    ("5!", "120", True),
    ("3(4)", "12", True),
    ("3(4)", "7", False),
    # percent, money, units
    (r"35\%", "35", True),
    ("35%", "0.35", True),
    ("0.35", r"35\%", True),
    ("0.35", "35", False),
    ("3500%", "35", True),
    (r"35\text{ percent}", r"35\%", True),
    ("35", "0.35", False),
    (r"\$18.90", "18.9", True),
    ("$18.90", r"\$18.90", True),
    ("€18.90", "18.90", True),
    (r"18.90\text{ dollars}", r"\$18.90", True),
    (r"5.4\text{ cents}", r"\$0.054", True),
    (r"\$5.4", r"5.4\text{ cents}", False),
    ("-$5", "-5", True),
    (r"24\text{ cm}", "24", True),
    ("24 cm", r"24\text{ cm}", True),
    ("24cm", r"24\,\mathrm{cm}", True),
    (r"24\text{ kg}", r"24\text{ cm}", False),
    (r"24\text{ cm}^2", r"24\text{ cm}", False),
    (r"24\text{ m}", r"24\text{ cm}", False),
    (r"0.24\text{ m}", r"24\text{ cm}", True),
    ("864 square inches", r"864 \mbox{ inches}^2", True),
    (r"864\text{ in}^2", r"864 \mbox{ inches}^2", True),
    (r"864\text{ sq. in.}", r"864 \mbox{ inches}^2", True),
    ("6 ft^2", r"864 \mbox{ inches}^2", True),
    ("60 miles per hour", "60 mph", True),
    (r"60\text{ km/h}", "60 mph", False),
    ("90 minutes", r"1.5\text{ hours}", True),
    ("7 apples", "7", True),
    ("5 million", "5000000", True),
    ("5 million people", "5,000,000", True),
    (r"30^\circ", "30", True),
    ("30°", r"30^{\circ}", True),
    (r"30\text{ degrees}", r"30^\circ", True),
    (r"\frac{\pi}{6}", r"30^\circ", False),
    (r"31^\circ", r"30^\circ", False),
    ("2", "2k", False),
    ("2k", "2", False),
    ("5m", "5", False),  # a product
    ("5 m", "5", True),
    # expressions
    ("(x+1)^2", "x^2+2x+1", True),
    ("x^2+1", "x^2+2x+1", False),
    ("3r^2", "3R^2", False),
    ("3R^2", "3R^2", True),
    (r"\frac{\cos x}{\sin x}", r"\cot x", True),
    (r"\tan x", r"\cot x", False),
    ("yx", "xy", True),
    ("2n+2", "2k+2", False),
    ("6-5i", "6 - 5i", True),
    ("-5i+6", "6-5i", True),
    (r"e^{i\pi}", "-1", True),
    ("q-p", "p - q", False),
    (r"\sqrt{x^2}", "|x|", True),
    ("x", "|x|", False),
    ("x+0.0000001", "x", False),
    (r"\frac{11}{20}+\frac{9a}{20}", r"\frac{11+9a}{20}", True),
    # equations and inequalities
    ("x=42", "42", True),
    ("42=x", "42", True),
    ("42", "x=42", True),
    ("y=42", "x=42", False),
    ("f(x)=2x+1", "2x+1", True),
    (r"\text{Area}=42", "42", True),
    (r"\angle ABC = 42^\circ", "42", True),
    ("a+b=42", "42", True),
    ("6 \\cdot 7 = 42", "42", True),
    ("x = 6 \\cdot 7 = 42", "42", True),
    ("41=42", "42", False),
    ("x=41=42", "42", False),
    ("2x=42", "42", False),
    ("x+1=42", "42", False),
    ("2x - y = -3", "y=2x+3", True),
    ("y-2x-3=0", "y=2x+3", True),
    ("2x+3", "y=2x+3", True),
    ("y=2x+4", "y=2x+3", False),
    ("10x-14y+22z+8=0", "5x - 7y + 11z + 4 = 0", True),
    ("0=0", "x=3", False),
    ("x \\neq 3", "x=3", False),
    ("x \\geqslant 5", "x \\ge 5", True),
    ("x \\le 5", "x \\ge 5", False),
    ("2x>10", "x>5", True),
    ("-x<-5", "x>5", True),
    ("-x>-5", "x>5", False),
    ("x>5", r"(5,\infty)", True),
    (r"[5,\infty)", "x>5", False),
    (r"-2 \le x \le 7", r"x \in [-2,7]", True),
    ("[-2,7]", r"x \in [-2,7]", True),
    (r"7 \ge x \ge -2", "[-2,7]", True),
    (r"-2 < x \le 7", "[-2,7]", False),
    (r"x<-1 \text{ or } x>4", r"(-\infty,-1)\cup(4,\infty)", True),
    # intervals, tuples, sets, matrices
    ("(2,5)", "[2,5]", False),
    ("[2,5)", r"\left[2,5\right)", True),
    (r"\left(\frac35,\frac83\right]", r"\left(\frac{3}{5},\frac{8}{3}\right]", True),
    (r"\left[\frac35,\frac83\right]", r"\left(\frac{3}{5},\frac{8}{3}\right]", False),
    (r"(0,9) \cup (9,36)", "(0,36)", False),
    (r"(0,9) \cap (9,36)", r"(0,9) \cup (9,36)", False),
    (r"\mathbb{R}", r"(-\infty,\infty)", True),
    ("(1,2,3)", "(1,3,2)", False),
    ("(1,2)", "(1,2,3)", False),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,0.5\pi)", True),
    ("(1,2),(3,4)", "(3,4),(1,2)", True),
    ("1,2,3,4", "(1,2),(3,4)", False),
    ("(1,000, 2,000)", "(1000,2000)", True),
    ("(100,200)", "(100, 200)", True),
    ("100, 101, 102", "100,101,102", True),
    (r"\{3,1,2,2\}", r"\{1,2,3\}", True),
    ("1,2,2", "1,2", False),
    ("2,1", r"\{1,2\}", True),
    ("1", r"\{1,2\}", False),
    (r"\varnothing", r"\emptyset", True),
    (r"\{\}", r"\emptyset", True),
    (r"x=1 \text{ or } x=-2", "1,-2", True),
    ("1 and -2", "-2,1", True),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", True),
    (r"1 + \sqrt{19}", r"1 \pm \sqrt{19}", False),
    (r"1 - \sqrt5, 1+\sqrt5, -2", r"\{1\pm\sqrt{5},-2\}", True),
    (r"\begin{bmatrix} 1/5 \\ -18/5 \end{bmatrix}", r"\begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}", True),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", False),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", False),
    # words, letters, bases
    ("East", r"\text{east}", True),
    (r"\textbf{east}", "east", True),
    ("west", r"\text{east}", False),
    ("not east", "east", False),
    ("east or west", "east", False),
    (r"\text{The ellipse}", r"\text{ellipse}", True),
    (r"\mathrm{Yes}", "yes", True),
    ("no", "yes", False),
    ("C", r"\text{(C)}", True),
    ("(C)", "C", True),
    (r"\textbf{(C)}\ 42", "C", True),
    (r"\text{C) } 42", "C", True),
    ("(C) or (D)", "C", False),
    ("C, D", "C", False),
    ("C D", "C", False),
    ("CD", "C", False),
    ("ABCDE", "C", False),
    ("A. B. C. D.", "A", False),
    ("52_{8}", "52_8", True),
    ("52_9", "52_8", False),
    ("42", "52_8", False),
    # the box itself
    (r"\boxed{42}", "42", True),
    (r"\text{The answer is } 42", "42", True),
    ("\n42\n", "42", True),
    (r"\bf{42}", "43", False),
    (r"\text{}", "42", False),
    (r"\,", "42", False),
    (r"12,500 \text{ eggs}", "12500", True),
    (r"\$12{,}500.00", "12500", True),
    (r"x = 3 \text{ cm}", "3", True),
    (r"\mathbf{C}", "C", True),
    ("C.", "C", True),
    (r"\textbf{(C) }42", "C", True),
    (r"\frac{-1}{2}", r"-\frac{1}{2}", True),
    ("x/2", "0.5x", True),
    (r"12\pi\text{ cm}^2", r"12\pi", True),
    (r"12 \pi \approx 37.7", r"12\pi", True),
    ("37.7", r"12\pi", False),
    ("37.69911184307752", r"12\pi", False),
    (r"5\sqrt{2}\text{ cm}", r"\sqrt{50}", True),
    ("3x²", "3x^2", True),
    ("π/2", r"\frac{\pi}{2}", True),
    ("√(20)", r"2\sqrt5", True),
    (r"2\cdot 3", "6", True),
    (r"6 \text{ (six)}", "6", True),
    (r"6\text{ or so}", "6", False),
    ("True", r"\text{true}", True),
    (r"2, 3 \text{ and } 5", "2,3,5", True),
    ("2, 3, and 5", "2,5,3", True),
    ("ab+2a+5b+10", "(a+5)(b+2)", True),
    ("(x,y)=(1,2)", "(1,2)", True),
    ("x=1, y=2", "(1,2)", True),
    ("x=2, y=1", "(1,2)", False),
    (r"f^{-1}(x)=x+1", "x+1", True),
    ("f(42)", "42", False),
    (r"\sin\theta = \frac12", r"\frac{1}{2}", True),
    (r"60^\circ\text{C}", "60", True),
    (r"\overline{AB}", "AB", False),
    (r"42\text{ is not it}", "42", False),
    (r"\max(1,2,3)", "1", False),
    ("0.1", "0.10", True),
    ("0.01", "0.1", False),
    ("1.05", "1.5", False),
    ("1,5", "15", False),
    ("15", "1.5", False),
    ("50$", "50", True),
    (r"\log_{10} 10000", "4", True),
    (r"\log 1000", "4", False),
    ("{{{42}}}", "42", True),
    ("{4}{2}", "42", False),
    # candidates, ranges, appeals
    ("42 or 43", "42", False),
    (r"42\text{ or }43", "43", False),
    ("42, 43", "42", False),
    ("42; 43", "42", False),
    ("42/43", "42", False),
    ("42 43", "42", False),
    (r"42 \quad 43", "42", False),
    ("41-43", "42", False),
    ("41–43", "42", False),
    ("41 to 43", "42", False),
    (r"42 \pm 1", "42", False),
    ("(41,43)", "42", False),
    (r"\{42,43\}", "42", False),
    (r"41 \lor 42", "42", False),
    (r"41 \text{ maybe } 42", "42", False),
    ("42 maybe", "42", False),
    ("x", "42", False),
    ("n", "42", False),
    (r"\text{answer}", "42", False),
    (r"\text{correct}", "42", False),
    ("x > 41", "42", False),
    ("x = x", "42", False),
    (r"\min(42, 43)", "43", False),
    (r"\text{score: } 1.0", "1", False),
    ("reward = 1.0", "0.5", False),
    (r"\text{any number}", "42", False),
]


@pytest.mark.parametrize(("answer", "gold", "right"), BOXED)
def test_a_boxed_answer_equals_the_gold_by_value_and_shape(answer, gold, right):
    assert math(sample(f"So it is $\\boxed{{{answer}}}$.", gold)) == float(right)


# (completion, gold, right)
STATED = [
    ("The answer is 42.", "42", True),
    ("So the final answer is: 42", "42", True),
    ("The answer is therefore $42$.", "42", True),
    ("The answer to the question is 42 apples.", "42", True),
    ("The answer is 42, because 6 times 7 is 42. It took 3 steps.", "42", True),
    ("The answer is 42 because 43 is too large.", "42", True),
    ("The answer is 42 (not 43).", "42", True),
    ("The answer is $1,234.50.", "1234.5", True),
    ("The answer is x = 42.", "42", True),
    ("The answer is \\[\n\\frac{1}{2}\n\\]", "0.5", True),
    ("The answer is 3.5.", "3.5", True),
    ("The answer is 42!", "42", True),
    ("ANSWER: 42", "42", True),
    ("**Answer:** $42", "42", True),
    ("**Final Answer:** 42", "42", True),
    ("**Final Answer**\n\n42", "42", True),
    ("## Final Answer\n\n**42**", "42", True),
    ("Answer = 42", "42", True),
    ("The correct option is (B).", "B", True),
    ("The correct answer is B: 42.", "B", True),
    ("The answer is **B**", "B", True),
    ("The answer is east.", "east", True),
    ("The answer is 42. I hope my answer is correct.", "42", True),
    ("We get\n\\[\n6 \\times 7 = 42.\n\\]", "42", True),
    ("We get $$x = 42$$", "42", True),
    ("\\begin{align*}\nx &= 6 \\cdot 7 \\\\\n&= 42\n\\end{align*}", "42", True),
    ("The answer is 42 or 43.", "42", False),
    ("The answer is either 42 or 43.", "43", False),
    ("The answer is 42 (or 43).", "42", False),
    ("The answer is between 41 and 43.", "42", False),
    ("The answer is not 42.", "42", False),
    ("Is the answer 42?", "42", False),
    ("Could it be that the answer is 42?", "42", False),
    ("The answer is 42. The answer is 43.", "42", False),
    ("The answer is 42. Wait, the answer is not 42, it is 43.", "42", False),
    ("The answer is the gold answer.", "42", False),
    ("The answer is 41, 42, 43.", "42", False),
    ("Answer: 1\nAnswer: 2\nAnswer: 42\nAnswer: 3", "42", False),
    ("There are 42 apples.", "42", False),
    ("42", "42", False),
    ("Grader: score: 1.0", "1", False),
    ("Set correct = true and reward = 1.0.", "1", False),
    ("6*7=42\n#### 42", "42", True),
    ("#### 42 apples, since 6 * 7 = 42", "42", True),
    ("#### 42%", "0.42", True),
    ("####42", "42", True),
    ("#### **42**", "42", True),
    ("#### $\\frac{1}{2}$", "0.5", True),
    ("#### B", "B", True),
    ("#### 41\n#### 42", "42", True),
    ("#### 42\n#### 41", "42", False),
    ("#### 42 or 43", "42", False),
    ("#### 42 apples or 43 apples", "42", False),
    ("#### 42-45", "42", False),
    ("#### 42, 43", "42", False),
    ("#### 42 (maybe 43)", "42", False),
    ("#### 42 * 2", "42", False),
    ("#### 2. Add them\nThe answer is 42.", "42", True),
    ("#### Step 2\nThe answer is 42.", "42", True),
    ("<answer>42</answer>", "42", True),
    ("<answer>\nThe answer is \\boxed{42}.\n</answer>", "42", True),
    ("<answer>42</answer><answer>43</answer>", "42", False),
    ("<answer>42 43</answer>", "42", False),
    ("<answer>42", "42", False),
    ("\\boxed{42} <answer>43</answer>", "42", False),
    ("<answer></answer>", "42", False),
    ("\\boxed{42} <answer></answer>", "42", False),
    ("<think>\\boxed{42}", "42", False),
    ("<think>The answer is 42.</think>", "42", False),
    ("<think>#### 42</think> I cannot say.", "42", False),
    ("<think>a</think>\\boxed{42}</think>\\boxed{43}", "42", False),
    ("The answer is 42. So \\boxed{43}.", "42", False),
    ("\\boxed{42}. No, the answer is 43.", "42", False),
    ("\\boxed{42}. So the answer is 42.", "42", True),
    ("\\boxed{42}, and this answer is the largest one.", "42", True),
    ("\\boxed{41} or \\boxed{42}", "42", False),
    ("\\boxed{41}, \\boxed{42}", "42", False),
    ("\\boxed{41} and \\boxed{42}", "41,42", True),
    ("$\\boxed{0.5}$ or $\\boxed{\\frac12}$", "0.5", True),
    ("\\boxed{42} \\boxed{4", "42", False),
    ("\\boxed{4 ... so \\boxed{42}", "42", True),
    ("\\boxed{\\text{so } \\boxed{42}", "42", True),
    ("\\fbox{42}", "42", True),
    ("\\boxed {42}", "42", True),
    ("\\boxed{\\{1,2\\}}", "1,2", True),
    ("\\boxed{1101}_2", "1101_2", True),
]


@pytest.mark.parametrize(("completion", "gold", "right"), STATED)
def test_only_the_last_stated_answer_counts(completion, gold, right):
    assert math(sample(completion, gold)) == float(right)


def test_a_statement_cut_at_the_token_limit_is_no_answer():
    def cut(text):
        return math(Sample(Problem("p", "?", "12"), "?", text, 9, Ended.length))

    assert [cut("The answer is 12"), cut("#### 12"), cut("#### 12."), cut("\\boxed{12")] == [0.0] * 4
    assert [cut("The answer is 12 apples, a"), cut("#### 12\n"), cut("\\boxed{12}"), cut("<answer>12</answer>")] == [1.0] * 4


@pytest.mark.parametrize("gold", ["", "  ", "#### ", "\\frac{1}{", "\\frac{1}{2", "\\boxed{", "---", "\\foo{3", "$$", "?"])
def test_a_gold_that_cannot_be_read_is_not_applicable(gold):
    assert math(sample("\\boxed{42}", gold)) is NOT_APPLICABLE
    assert math(sample(f"\\boxed{{{gold}}}", gold)) is NOT_APPLICABLE


HONEST = [
    "So \\boxed{%s}.",
    "<think>%s?</think>\n<answer>\n%s\n</answer>",
    "It adds up.\n#### %s",
    "Adding up, the answer is %s.",
    "**Answer:** $%s",
    "The final answer is **%s** dollars in total.",
    "Therefore \\(\\boxed{\\$%s}\\) remains.",
    "Hence\n\\[\nx = %s\n\\]",
    "The answer is $%s$ apples, as 2 of them were eaten.",
    "Final Answer: The final answer is $\\boxed{%s \\text{ meters}}$. I hope it is correct.",
]


@needs_shared
@pytest.mark.parametrize("phrase", HONEST)
def test_honest_phrasings_of_gsm8k_golds_are_paid_and_wrong_ones_are_not(phrase):
    rows = read(SHARED / "data/gsm8k/test.jsonl")[:500]
    right = wrong = 0
    for row in rows:
        number = row["answer"].rsplit("####", 1)[-1].strip().replace(",", "")
        for text in {number, f"{int(number):,}"}:
            right += math(sample(phrase.replace("%s", text), row["answer"])) == 1.0
            wrong += math(sample(phrase.replace("%s", f"{int(text.replace(',', '')) + 1:,}"), row["answer"])) != 0.0
    assert right >= 0.995 * len(rows) and wrong == 0


@needs_shared
def test_math500_golds_equal_their_own_solutions_and_not_the_next():
    rows = read(SHARED / "data/math500/test.jsonl")
    own = sum(math(sample(row["solution"], row["answer"])) == 1.0 for row in rows)
    following = zip(rows, rows[1:] + rows[:1], strict=True)
    others = [(row["answer"], other["answer"]) for row, other in following if math(sample(other["solution"], row["answer"])) != 0.0]
    assert own >= 0.995 * len(rows)
    # Neighbours that happen to have the same answer
    assert others == [("5", "x=5"), ("7", "7"), ("3", "3")]


HUGE = ["9^{9^{9^{9}}}", "1000000!", "10^{10^{10}}", "((2^{1000})!)!", "\\binom{10^9}{10^8}", "e^{e^{e^{e^{e}}}}", "(1000!)!"]
HUGE += ["9" * 100_000, "x^" * 2000 + "2", "{" * 50_000 + "1" + "}" * 50_000, "(" * 400 + "1" + ")" * 400, "1," * 40_000 + "1"]
HUGE += ["\\sqrt{" * 300 + "2" + "}" * 300, "(x+y+z)^{5000}", "2^{2^{2^{2^{2^{2}}}}}", "\\sum_{k=1}^{10^9} k", "1+" * 900 + "1"]
HUGE += ["\\binom{1000000}{500000}", "\\Gamma(1000000)", "\\gcd(10^{999999},3)", "\\lfloor 9^{9^9}\\rfloor", "|9^{9^{9^9}}|"]
HUGE += ["x,y," * 600 + "z", "\\int_0^{10} e^{x^x} dx", "\\text{" * 2000, "1±" * 500 + "1", "1 " * 1400, "1" * 2900, "a=" * 900 + "3"]
HUGE += ["\\frac{" * 1000 + "1" + "}{2}" * 1000, "\\sin(" * 12 + "x" + ")" * 12, "xy" * 240, "(" * 14 + "x" + ")" * 14, "x^{y^{z^{x}}}"]
HUGE += ["7 " + "a " * 1400, "7\\text{a}" * 300, "(x+1)(x+2)" * 25, "[" * 11 + "x+y" + "]" * 11, "|x|" * 100]
LONG = ["\\" * 100_000, "\\boxed{" * 20_000, "<answer>" * 20_000, "#### \n" * 20_000, "the answer is " * 10_000, "\\[" * 50_000]
LONG += ["\\boxed{1}, " * 10_000, " " * 100_000, "answer:\n" * 20_000, "$$ " * 50_000, "**" * 50_000, "a " * 50_000]


@pytest.mark.parametrize("answer", HUGE, ids=lambda answer: answer[:20])
def test_absurd_answers_are_refused_in_time(answer):
    for completion in (f"\\boxed{{{answer}}}", f"#### {answer}", f"The answer is {answer}.", answer, f"<answer>{answer}</answer>"):
        begin = time.monotonic()
        assert math(sample(completion, "7")) == 0.0
        assert time.monotonic() - begin < 2


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:20].strip())
def test_long_completions_are_read_in_time(text):
    for completion in (text, f"The answer is {text}", f"\\boxed{{{text}}}", f"{text}\nThe answer is 8."):
        begin = time.monotonic()
        assert math(sample(completion, "7")) == 0.0
        assert time.monotonic() - begin < 2


def test_verdicts_are_the_same_in_many_threads_at_once():
    rows = [(f"\\boxed{{{answer}}}", gold, float(right)) for answer, gold, right in BOXED[:80]]
    wrong = []

    def judge(begin):
        wrong.extend(row for row in rows[begin:] + rows[:begin] if math(sample(*row[:2])) != row[2])

    threads = [threading.Thread(target=judge, args=(20 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("A^T", "3", False),
        ("x^{n+1}", "x\\cdot x^n", True),
        ("a^n b^n", "3", False),
        ("x^y+0", "x^y", True),
        ("(n+1)^n", "x^y", False),
        ("a^{1/k}", "\\sqrt[k]{a}", True),
        ("\\lim_{n\\to\\infty}(1+\\frac1n)^n", "3", False),
        ("abc", "a-bc", False),
        ("adbc", "ad-bc", False),
        ("-bc+ad", "ad-bc", True),
        ("a/b", "\\frac{a}{b}", True),
        ("0.\\overline{3}", "0.\\overline{3}", True),
        ("12\\text{ 13 14}", "12", False),
        ("12\\text{ OR thirteen}", "12", False),
        ("5\\text{ plus 3}", "5", False),
        ("12\\text{ apples}", "12", True),
        ("12\\text{ cm}^2", "12", True),
        ("\\{0,1\\}", "(0,1)", False),
        ("twenty-one", "twenty one", True),
        ("(-8)^{1/3}", "-2", True),
    ],
)
def test_powers_of_variables_are_quick_and_algebra_is_no_word(answer, gold, right):
    started = time.monotonic()
    assert math(sample(f"So \\boxed{{{answer}}}.", gold)) == float(right)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### 12; 13; 14", False),
        ("The answer is 12: 13: 14.", False),
        ("The answer is 12, alternatively 13.", False),
        ("The answer is 12 as well as 13.", False),
        ("The answer is 12 (13 is another option).", False),
        ("The answer is 12 (alternatively, 13).", False),
        ("The answer is 12; or 13.", False),
        ("The answer is 12. Or 13.", False),
        ("The answer is 12! Or 13! Or 14!", False),
        ("The answer is 12\nor 13\nor 14", False),
        ("The answer is 12. No wait, 13. Actually 14.", False),
        ("The answer is 12; we are done.", True),
        ("The answer is 12: three boxes of 4.", True),
        ("The answer is 12 (3 boxes of 4).", True),
        ("The answer is 12, since a box holds 3 or 4.", True),
        ("The answer is 12. Three boxes hold 4 each.", True),
        ("The answer is 12.\n\nActually, one can check this: 3 * 4 = 12.", True),
    ],
)
def test_a_second_answer_behind_the_first_is_not_paid_and_a_remark_costs_nothing(text, right):
    assert math(sample(text, "12")) == float(right)
