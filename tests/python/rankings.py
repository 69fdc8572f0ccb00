"""Searches and reranks a small corpus through rocmforged with LangChain, as its users install it:
OpenAIEmbeddings with a vector store, and CohereRerank behind that.

The order of the documents by each goes to stdout, one line of numbers each. Exit 0 only if both
agree with what tests/fixtures/encoders/ranking.json has of the authors' code.

usage: rankings.py --url http://127.0.0.1:PORT --token TOKEN --corpus FILE --encoder NAME --reranker NAME
"""

import argparse
import json
import math
import pathlib

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings


def expect(condition, words):
    if not condition:
        raise SystemExit(f"rankings: {words}")


def order(fits):
    return sorted(range(len(fits)), key=lambda i: -fits[i])


def search(args, corpus):
    """The documents by the distance of their embeddings, and how near they are."""
    embeddings = OpenAIEmbeddings(
        base_url=f"{args.url}/v1", api_key=args.token, model=args.encoder, check_embedding_ctx_length=False
    )
    store = InMemoryVectorStore(embeddings)
    texts = [Document(page_content=text, metadata={"at": at}) for at, text in enumerate(corpus["documents"])]
    store.add_documents(texts)
    found = store.similarity_search_with_score(corpus["query"], k=len(texts))
    fits = corpus["fits"][args.encoder]
    for document, score in found:
        expect(abs(score - fits[document.metadata["at"]]) < 4e-3, f"cosine {score} of {document}")
    retriever = store.as_retriever(search_kwargs={"k": 3})
    first = [document.metadata["at"] for document in retriever.invoke(corpus["query"])]
    expect(first == order(fits)[:3], f"the retriever found {first}")
    return [document.metadata["at"] for document, _ in found]


def rerank(args, corpus):
    """The documents by the reranker."""
    reranker = CohereRerank(base_url=args.url, cohere_api_key=args.token, model=args.reranker, top_n=None)
    ranked = reranker.rerank(corpus["documents"], corpus["query"])
    for document in ranked:
        expected = 1 / (1 + math.exp(-corpus["fits"][args.reranker][document["index"]]))
        expect(abs(document["relevance_score"] - expected) < 3e-3, f"score {document}, not {expected}")
    best = CohereRerank(base_url=args.url, cohere_api_key=args.token, model=args.reranker, top_n=2)
    texts = [Document(page_content=text) for text in corpus["documents"]]
    best = [corpus["documents"].index(d.page_content) for d in best.compress_documents(texts, corpus["query"])]
    expect(best == [document["index"] for document in ranked[:2]], f"the best are {best}")
    return [document["index"] for document in ranked]


def main():
    parser = argparse.ArgumentParser()
    for name in ("url", "token", "corpus", "encoder", "reranker"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    corpus = json.loads(pathlib.Path(args.corpus).read_text())
    for model, found in ((args.encoder, search(args, corpus)), (args.reranker, rerank(args, corpus))):
        expect(found == order(corpus["fits"][model]), f"{model} has {found}")
        print(*found)


if __name__ == "__main__":
    main()
