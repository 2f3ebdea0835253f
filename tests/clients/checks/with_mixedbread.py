"""mixedbread's client."""

from mixedbread import Mixedbread
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, check_ranking, check_vectors

_MODEL = "all-MiniLM-L6-v2"


def ranks() -> None:
    for url in ALL:
        client = Mixedbread(api_key="none", base_url=url)
        answer = client.rerank(model=_MODEL, query=QUERY, input=list(DOCUMENTS), top_k=3, return_input=True)
        check_ranking(url, [(each.index, each.score) for each in answer.data], top=3)
        assert [each.input for each in answer.data] == [DOCUMENTS[each.index] for each in answer.data]


def embeds() -> None:
    client = Mixedbread(api_key="none", base_url=BI_ENCODER)
    answer = client.embed(model=_MODEL, input=list(DOCUMENTS), normalized=True, encoding_format="float")
    check_vectors([each.embedding for each in answer.data], DOCUMENTS)
