"""Vectors by the clients of OpenAI, litellm, langchain and Ollama. Arguments: URL MODEL. Prints one JSON object."""

import json
import math
import sys

import litellm
import ollama
import openai
from langchain_openai import OpenAIEmbeddings
from openai.types import CreateEmbeddingResponse

TEXTS = ["The sky is blue.", "Grass is green.", "What colour is the sky?"]
base, model = sys.argv[1:]
to = {"api_base": f"{base}/v1", "api_key": "unused", "num_retries": 0}
client = openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0)
raw = client.embeddings.with_raw_response.create(model=model, input=TEXTS, encoding_format="float")
CreateEmbeddingResponse.model_validate_json(raw.text, strict=True)
of_openai = client.embeddings.create(model=model, input=TEXTS)  # it asks for base64
vectors = [one.embedding for one in of_openai.data]


def is_same(others):
    """Whether they are the same vectors, up to the digits that JSON carries and the order of sums."""
    pairs = [pair for one, other in zip(vectors, others, strict=True) for pair in zip(one, other, strict=True)]
    return all(math.isclose(a, b, abs_tol=1e-3) for a, b in pairs)


of_litellm = litellm.embedding(f"openai/{model}", input=TEXTS, encoding_format="float", **to)
through_ollama = litellm.embedding(f"ollama/{model}", input=TEXTS, api_base=base)
langchain = OpenAIEmbeddings(
    model=model, base_url=f"{base}/v1", api_key="unused", check_embedding_ctx_length=False, max_retries=0
)
native = ollama.Client(base)
single = native.embeddings(model=model, prompt=TEXTS[0]).embedding
length = math.sqrt(sum(value * value for value in single))
print(
    json.dumps(
        {
            "length": round(math.sqrt(sum(value * value for value in vectors[0])), 5),
            "floats": is_same([one.embedding for one in raw.parse().data]),
            "tokens": of_openai.usage.total_tokens > 3,
            "short": len(client.embeddings.create(model=model, input="x", dimensions=8).data[0].embedding),
            "litellm": is_same([one["embedding"] for one in of_litellm.data]),
            "litellm_ollama": is_same([one["embedding"] for one in through_ollama.data]),
            "langchain": is_same(langchain.embed_documents(TEXTS)),
            "langchain_query": is_same([langchain.embed_query(text) for text in TEXTS]),
            "ollama": is_same([list(one) for one in native.embed(model=model, input=TEXTS).embeddings]),
            "ollama_older": is_same([[value / length for value in single], *vectors[1:]]),
        }
    )
)
