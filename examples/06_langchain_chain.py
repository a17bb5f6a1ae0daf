"""A LangChain chain: prompt | model | parser. The parser gets the answer that most branches gave.

python examples/06_langchain_chain.py
"""

from contextlib import closing

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_rksc import ChatRKSC

prompt = ChatPromptTemplate([("system", "Answer with one number."), ("human", "What is {first} + {second}?")])
strategy = {"name": "self-consistency", "branches": 4}
with closing(ChatRKSC(model="smollm2-135m-instruct", strategy=strategy, temperature=0.5, max_tokens=32)) as chat:
    message = (prompt | chat).invoke({"first": 17, "second": 25})
    print((prompt | chat | StrOutputParser()).invoke({"first": 2, "second": 2}))
print(message.response_metadata["rksc"]["votes"])
