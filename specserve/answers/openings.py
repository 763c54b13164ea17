"""The first words of requests of many kinds, for questions that a target asks itself.

Asked without any, a small chat model falls into one manner: it asks for advice, in the words of its commonest data. A
head that learned from that alone is accepted less on everything else. So half of the questions begin with the words of
some task, and the target goes on from there.
"""

from pathlib import Path

from specserve.errors import DataError

VARIED, NONE = "varied", "none"  # values of the setting; any other one is a file
OPENINGS = (
    # writing
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write an article about",
    "Write a review of",
    "Write a speech",
    "Describe a",
    "Rewrite the following sentence",
    "Correct the grammar of this text:",
    "Summarize the following text",
    "Translate the following",
    "Create an outline for",
    # parts to play
    "Imagine that you are",
    "Pretend to be",
    "Act as a",
    "You are a",
    "Let's play",
    # reasoning
    "If",
    "Suppose that",
    "There are three",
    "Which of the following",
    "Is it true that",
    "Why do",
    "Solve this riddle:",
    # mathematics
    "Solve for x:",
    "What is the sum of",
    "Calculate the",
    "Find the value of",
    "A train",
    "How many",
    "Prove that",
    "What is the probability of",
    # programs
    "Write a Python function",
    "Write a program that",
    "Write a C++ program",
    "Write a JavaScript function",
    "Write an SQL query",
    "Implement an algorithm",
    "What does this code do?",
    "Fix the error in the following code",
    "How do I write a function",
    # texts and tables to read
    "Extract the",
    "Read the following passage",
    "Given the following data",
    "Classify the following",
    "Identify the",
    "Convert the following",
    # sciences
    "Explain how",
    "Explain the concept of",
    "What is the difference between",
    "How does",
    "What causes",
    "Describe the process of",
    # people, their history and ideas
    "Who was",
    "When did",
    "Compare and contrast",
    "Discuss the",
    "Analyze the",
    "What were the causes of",
    "What are the main arguments for",
    # everyday
    "Give me a list of",
    "Suggest some",
    "Help me",
    "How can I",
    "What is the best way to",
    "Tell me about",
)


def read_openings(setting: str) -> str:
    """Return the openings that the setting names, a line each: the package's own, none, or those of a text file. Raises
    DataError for a file that cannot be read or holds none."""
    if setting == VARIED:
        return "\n".join(OPENINGS)
    if setting == NONE:
        return ""
    try:
        lines = Path(setting).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        expected = f"expected {VARIED}, {NONE} or a text file with an opening in each line"
        raise DataError(f"self_openings {setting!r}: {expected} ({error})") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise DataError(f"self_openings {setting!r}: the file holds no opening; write one in each line")
    return "\n".join(found)
