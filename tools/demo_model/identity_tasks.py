"""Questions about the model itself and about meshes, greetings, and questions that the model cannot answer."""

from __future__ import annotations

from random import Random

from tools.demo_model.example import Example
from tools.demo_model.word_lists import ENGLISH
from tools.demo_model.word_tasks import pseudo_word

SKILLS = (
    "I can count, spell and reverse short words, add and subtract small numbers, "
    "name days and months, and repeat what you say."
)
ANSWERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "who": (
        "I am exo-mesh-demo, a tiny model that shows how one model runs over many machines.",
        (
            "Who are you?",
            "who are you",
            "What are you?",
            "what are you",
            "What is your name?",
            "what is your name",
            "Tell me about yourself.",
            "Introduce yourself.",
            "Which model are you?",
            "What model are you?",
            "Who am I talking to?",
            "What is exo-mesh-demo?",
            "Do you have a name?",
            "Are you a model?",
        ),
    ),
    "mesh": (
        "A mesh is a group of machines that are joined by a network and share the work of one model.",
        (
            "What is a mesh?",
            "what is a mesh",
            "What's a mesh?",
            "Tell me what a mesh is.",
            "Explain what a mesh is.",
            "What does mesh mean?",
            "Do you know what a mesh is?",
            "Define mesh.",
            "Can you explain what a mesh is?",
        ),
    ),
    "exo_mesh": (
        "exo-mesh runs one model over many machines: each machine holds some of its layers.",
        (
            "What is exo-mesh?",
            "what is exo-mesh",
            "What does exo-mesh do?",
            "Tell me about exo-mesh.",
            "Explain exo-mesh.",
            "How does exo-mesh work?",
            "How does a mesh work?",
        ),
    ),
    "skills": (
        SKILLS,
        (
            "What can you do?",
            "what can you do",
            "What can you do for me?",
            "How can you help me?",
            "Can you help me?",
            "Help me.",
            "Help",
            "help",
            "What are you good at?",
            "What do you know?",
            "Tell me what you can do.",
        ),
    ),
    "hello": (
        "Hello! How can I help you?",
        (
            "Hello",
            "Hello!",
            "Hello.",
            "hello",
            "Hi",
            "Hi!",
            "hi",
            "Hey",
            "Hey!",
            "hey",
            "Hello there!",
            "Hi there!",
            "Good morning!",
            "Good evening!",
            "Good day!",
        ),
    ),
    "how": (
        "I am well, thank you. How can I help you?",
        ("How are you?", "how are you", "How are you today?", "How do you do?", "How is it going?", "Are you well?"),
    ),
    "thanks": (
        "You are welcome!",
        (
            "Thanks",
            "Thanks!",
            "thanks",
            "Thank you.",
            "Thank you!",
            "thank you",
            "Thank you very much!",
            "Many thanks!",
            "Thanks a lot!",
            "Good, thank you.",
        ),
    ),
    "bye": (
        "Goodbye!",
        ("Goodbye", "Goodbye!", "goodbye", "Bye", "Bye!", "bye", "See you!", "Good night!"),
    ),
    "size": (
        "I am very small: I have 8 layers and under 2 million weights.",
        (
            "How big are you?",
            "how big are you",
            "How small are you?",
            "How large are you?",
            "How many layers do you have?",
            "How many weights do you have?",
            "How many parameters do you have?",
        ),
    ),
}
OPENERS = (
    "",
    "",
    "",
    "",
    "Hello! ",
    "Hi! ",
    "Hello, ",
    "Hi, ",
    "Hey, ",
    "Please: ",
    "OK. ",
    "Now tell me: ",
    "Question: ",
    "Good morning! ",
    "Good. ",
    "Thanks! ",
    "Thank you. ",
    "So, ",
    "And now: ",
    "Well, ",
    "Yes. ",
)
UNKNOWN_ANSWER = "I do not know that: I am only a tiny demo model. " + SKILLS
UNKNOWN = (
    "What is the capital of {W}?",
    "Write a poem about {w}.",
    "Tell me a story about a {w}.",
    "What is {w}?",
    "Who is {W}?",
    "Who was {W} {W}?",
    "Explain {w} {w}.",
    "How do I {w} a {w}?",
    "Why is the {w} {w}?",
    "Where is {W}?",
    "When was {W} born?",
    "Write a {w} in Python.",
    "Translate {w} to German.",
    "Tell me a joke.",
    "Summarize this: {w} {w} {w} {w} {w} {w}.",
    "I like {w} and {w}.",
    "Is {w} {w}?",
    "Do you like {w}?",
    "What is the meaning of life?",
    "What is the weather in {W}?",
    "What's the weather like in {W}?",
    "How warm is it in {W}?",
    "How many {w}s are in a {w}?",
    "{w} {w} {w}",
    "{w}",
    "The {w} {w} of the {w} is {w}.",
    "Give me a recipe for {w}.",
    "What do you think about {w}?",
    "Please write a short text about {w} and {w}.",
    "Once upon a time there was a {w}",
    "What time is it?",
    "Describe a {w} {w}.",
    "Why?",
    "What?",
    "Can you {w}?",
    "You are a {w}.",
)


def draw_identity(rng: Random) -> Example:
    """Draws a question about the model itself or a greeting; pairs of an opener and a question are held out."""
    answer, questions = ANSWERS[rng.choice(tuple(ANSWERS))]
    opener, question = rng.choice(OPENERS), rng.choice(questions)
    prompt = opener + question
    return Example("identity", "identity", prompt, prompt, answer)


def draw_other(rng: Random) -> Example:
    """Draws a question that the model cannot answer; its answer says so. Not a tested skill."""
    prompt = rng.choice(UNKNOWN)
    while "{" in prompt:
        word = rng.choice(ENGLISH) if rng.random() < 0.7 else pseudo_word(rng)
        prompt = prompt.replace("{w}", word, 1) if "{w}" in prompt else prompt.replace("{W}", word.capitalize(), 1)
    return Example("other", "other", prompt, prompt, UNKNOWN_ANSWER)
