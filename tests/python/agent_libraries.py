"""Agents' libraries against models whose answers are known word for word (scripted.py): two turns,
two tools at once and their results, reasoning, a call that is no JSON, a prompt that exceeds the
context, an answer that is left in the middle, and for some a forced call, a stop string and a JSON
schema. What each library makes of it is held against the script: texts, arguments, counts of
tokens, classes of errors.

usage: agent_libraries.py --url URL --token TOKEN --scripts FILE --libraries NAME,... --models NAME,...

Prints `LIBRARY MODEL` for each that was served well.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable

import httpx

QUESTION = "say:{}"
# Past the context of the scripted models, in letters that are a token each.
FLOOD = "x" * 40_000
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ARGUMENTS = [("weather", {"city": "Paris", "days": 2}), ("clock", {"zone": "CET"})]
THOUGHT = "Three and four make seven."


class Ground:
    """Where a library is tried."""

    def __init__(self, url, token, model, scripts):
        self.url, self.token, self.model, self.scripts = url, token, model, scripts
        self.openai = {"base_url": f"{url}/v1", "api_key": token}

    def text(self, name):
        return self.scripts[name]["text"]

    def tokens(self, name):
        return self.scripts[name]["tokens"]

    def nothing_runs(self, what):
        """What was left ends within moments, not at its end."""
        until = time.monotonic() + 20
        while self.running() > 0:
            expect(time.monotonic() < until, what, "goes on after its client left")
            time.sleep(0.02)

    def running(self):
        metrics = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {self.token}"}).text
        line = next(line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running"))
        return float(line.rsplit(" ", 1)[1])


def expect(condition, *words):
    if not condition:
        raise SystemExit("agent_libraries: " + " ".join(map(str, words)))


def same(what, found, expected):
    expect(found == expected, what, "is", repr(found), "and not", repr(expected))


def raised(kind, call, *words):
    try:
        call()
    except kind as error:
        for word in words:
            expect(word in str(error), repr(str(error)), "lacks", word)
        return error
    raise SystemExit(f"agent_libraries: {kind.__name__} was expected")


def weather(city: str, days: int) -> str:
    """The weather of a city."""
    CALLED.append(("weather", {"city": city, "days": days}))
    return "21 degrees"


def clock(zone: str) -> str:
    """The time of a zone."""
    CALLED.append(("clock", {"zone": zone}))
    return "noon"


CALLED = []


def called():
    """The calls since the last look, in the order of their names: libraries make them at once."""
    calls = sorted(CALLED, key=lambda call: call[0], reverse=True)
    CALLED.clear()
    return calls


def openai_agents(ground):
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(**ground.openai, max_retries=0)
    kinds = [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel]
    tools = [agents.function_tool(weather), agents.function_tool(clock)]
    settings = agents.ModelSettings(temperature=0, parallel_tool_calls=True)

    async def one(kind):
        agent = agents.Agent(name="a", model=kind(ground.model, client), model_settings=settings, tools=tools)
        first = await agents.Runner.run(agent, QUESTION.format("first"))
        same("the first answer", first.final_output, ground.text("first"))
        same("its tokens", first.context_wrapper.usage.output_tokens, ground.tokens("first"))
        turns = first.to_input_list() + [{"role": "user", "content": QUESTION.format("second")}]
        second = await agents.Runner.run(agent, turns)
        same("the second answer", second.final_output, ground.text("second"))
        with_tools = await agents.Runner.run(agent, QUESTION.format("tools"))
        same("the calls", called(), ARGUMENTS)
        same("the answer behind them", with_tools.final_output, ground.text("results"))
        streamed = agents.Runner.run_streamed(agent, QUESTION.format("tools"))
        async for _ in streamed.stream_events():
            pass
        same("the streamed calls", called(), ARGUMENTS)
        same("the streamed answer behind them", streamed.final_output, ground.text("results"))
        thought = await agents.Runner.run(agent, QUESTION.format("thought"))
        same("the answer behind a thought", thought.final_output, "Seven.")
        thoughts = [item for item in thought.new_items if item.type == "reasoning_item"]
        same("the thoughts", len(thoughts), 1)
        # Of tools that are not strict a broken call comes as the model writes it. The library tells
        # the model, and the model goes on.
        loose = agent.clone(tools=[agents.function_tool(tool, strict_mode=False) for tool in (weather, clock)])
        broken = await agents.Runner.run(loose, QUESTION.format("broken"))
        same("the answer behind a broken call", broken.final_output, ground.text("results"))
        same("calls of a broken one", called(), [])
        try:
            await agents.Runner.run(agent, QUESTION.format("first") + FLOOD)
        except openai.BadRequestError as error:
            same("the code of an overflow", error.code, "context_length_exceeded")
        else:
            raise SystemExit("agent_libraries: an overflow is no error")
        left = agents.Runner.run_streamed(agent, QUESTION.format("long"))
        async for event in left.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                break
        left.cancel()

    for kind in kinds:
        asyncio.run(one(kind))
        ground.nothing_runs(kind.__name__)


def pydantic_ai(ground):
    from pydantic_ai import Agent, ModelHTTPError, Tool
    from pydantic_ai.messages import ThinkingPart
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(**ground.openai)
    agent = Agent(OpenAIChatModel(ground.model, provider=provider), tools=[weather, clock], model_settings={"temperature": 0})
    first = agent.run_sync(QUESTION.format("first"))
    same("the first answer", first.output, ground.text("first"))
    usage = first.usage
    same("its tokens", usage.output_tokens, ground.tokens("first"))
    second = agent.run_sync(QUESTION.format("second"), message_history=first.all_messages())
    same("the second answer", second.output, ground.text("second"))
    same("the answer behind tools", agent.run_sync(QUESTION.format("tools")).output, ground.text("results"))
    same("the calls", called(), ARGUMENTS)
    thought = agent.run_sync(QUESTION.format("thought"))
    same("the answer behind a thought", thought.output, "Seven.")
    parts = [part for message in thought.all_messages() for part in message.parts if isinstance(part, ThinkingPart)]
    same("the thought", [part.content.strip() for part in parts], [THOUGHT])
    # Of tools that are not strict a broken call comes as the model writes it, and is asked for
    # again.
    tools = [Tool(tool, strict=False) for tool in (weather, clock)]
    loose = Agent(agent.model, tools=tools, model_settings={"temperature": 0})
    broken = loose.run_sync(QUESTION.format("broken"))
    same("the answer behind a broken call", broken.output, ground.text("results"))
    same("calls of a broken one", called(), [])
    error = raised(ModelHTTPError, lambda: agent.run_sync(QUESTION.format("first") + FLOOD))
    same("the status of an overflow", error.status_code, 400)
    same("the code of an overflow", error.body["code"], "context_length_exceeded")

    async def leave():
        async with agent.run_stream(QUESTION.format("long")) as stream:
            async for _ in stream.stream_text(delta=True, debounce_by=None):
                break

    asyncio.run(leave())
    ground.nothing_runs("pydantic_ai")


def langchain(ground):
    import openai
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=ground.model, temperature=0, max_retries=0, stream_usage=True, **ground.openai)
    first = model.invoke([HumanMessage(QUESTION.format("first"))])
    same("the first answer", first.content, ground.text("first"))
    same("its tokens", first.usage_metadata["output_tokens"], ground.tokens("first"))
    second = model.invoke([HumanMessage(QUESTION.format("first")), first, HumanMessage(QUESTION.format("second"))])
    same("the second answer", second.content, ground.text("second"))
    with_tools = model.bind_tools([tool(weather), tool(clock)])
    asked = [HumanMessage(QUESTION.format("tools"))]
    calls = with_tools.invoke(asked)
    same("the calls", [(call["name"], call["args"]) for call in calls.tool_calls], ARGUMENTS)
    results = [ToolMessage("21 degrees", tool_call_id=calls.tool_calls[0]["id"]), ToolMessage("noon", tool_call_id=calls.tool_calls[1]["id"])]
    same("the answer behind them", with_tools.invoke([*asked, calls, *results]).content, ground.text("results"))
    whole = None
    for chunk in with_tools.stream(asked):
        whole = chunk if whole is None else whole + chunk
    same("the streamed calls", [(call["name"], call["args"]) for call in whole.tool_calls], ARGUMENTS)
    same("the streamed tokens", whole.usage_metadata["output_tokens"], ground.tokens("tools"))
    forced = model.bind_tools([tool(weather), tool(clock)], tool_choice="weather").invoke(asked)
    same("a forced call", [(call["name"], call["args"]) for call in forced.tool_calls][:1], ARGUMENTS[:1])
    stopped = model.invoke([HumanMessage(QUESTION.format("first"))], stop=["seven"])
    same("a stopped answer", stopped.content, ground.text("first").split("seven")[0])
    held = model.with_structured_output({"title": "city", **WEATHER}, method="json_schema", strict=True)
    same("an answer held to a schema", held.invoke(QUESTION.format("json")), ARGUMENTS[0][1])
    thought = model.invoke([HumanMessage(QUESTION.format("thought"))])
    same("the answer behind a thought", thought.content, "Seven.")
    counted = thought.usage_metadata["output_token_details"]["reasoning"]
    expect(0 < counted < ground.tokens("thought"), "tokens of reasoning:", counted)
    broken = with_tools.invoke([HumanMessage(QUESTION.format("broken"))])
    expect(isinstance(broken, AIMessage) and broken.tool_calls == [], "a broken call is taken", broken)
    same("a broken call", [call["args"] for call in broken.invalid_tool_calls], ['{"city": Paris}'])
    error = raised(openai.BadRequestError, lambda: model.invoke([HumanMessage(QUESTION.format("first") + FLOOD)]))
    same("the code of an overflow", error.code, "context_length_exceeded")
    stream = model.stream([HumanMessage(QUESTION.format("long"))])
    next(stream), next(stream)
    stream.close()
    ground.nothing_runs("langchain")


def llama_index(ground):
    import openai
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=ground.model, api_base=f"{ground.url}/v1", api_key=ground.token, temperature=0, max_retries=0,
        is_chat_model=True, is_function_calling_model=True, context_window=32768,
    )
    ask = lambda name: ChatMessage(role="user", content=QUESTION.format(name))
    first = model.chat([ask("first")])
    same("the first answer", first.message.content, ground.text("first"))
    same("its tokens", first.raw.usage.completion_tokens, ground.tokens("first"))
    same("the second answer", model.chat([ask("first"), first.message, ask("second")]).message.content, ground.text("second"))
    tools = [FunctionTool.from_defaults(weather), FunctionTool.from_defaults(clock)]
    answer = model.chat_with_tools(tools, chat_history=[ask("tools")], allow_parallel_tool_calls=True)
    calls = model.get_tool_calls_from_response(answer)
    same("the calls", [(call.tool_name, call.tool_kwargs) for call in calls], ARGUMENTS)
    results = [ChatMessage(role="tool", content="21 degrees", additional_kwargs={"tool_call_id": call.tool_id}) for call in calls]
    last = model.chat([ask("tools"), answer.message, *results])
    same("the answer behind them", last.message.content, ground.text("results"))
    forced = model.chat_with_tools(tools, chat_history=[ask("tools")], tool_required=True)
    first_call = model.get_tool_calls_from_response(forced)[0]
    same("a forced call", (first_call.tool_name, first_call.tool_kwargs), ARGUMENTS[0])
    stopped = model.chat([ask("first")], stop=["seven"]).message.content
    same("a stopped answer", stopped, ground.text("first").split("seven")[0])
    same("the answer behind a thought", model.chat([ask("thought")]).message.content, "Seven.")
    broken = model.chat_with_tools(tools, chat_history=[ask("broken")])
    # The library takes what it cannot read as no arguments.
    same("a broken call", [call.tool_kwargs for call in model.get_tool_calls_from_response(broken)], [{}])
    flood = ChatMessage(role="user", content=QUESTION.format("first") + FLOOD)
    error = raised(openai.BadRequestError, lambda: model.chat([flood]))
    same("the code of an overflow", error.code, "context_length_exceeded")
    stream = model.stream_chat([ask("long")])
    next(stream), next(stream)
    stream.close()
    ground.nothing_runs("llama_index")


def instructor(ground):
    import instructor
    import openai
    from pydantic import BaseModel, create_model

    class City(BaseModel):
        city: str
        days: int

    plain = openai.OpenAI(**ground.openai, max_retries=0)
    asked = lambda name: {"model": ground.model, "messages": [{"role": "user", "content": QUESTION.format(name)}], "temperature": 0}
    modes = instructor.Mode
    for mode, script in ((modes.TOOLS, "city"), (modes.TOOLS_STRICT, "city"), (modes.JSON_SCHEMA, "json")):
        client = instructor.from_openai(plain, mode=mode)
        found, whole = client.chat.completions.create_with_completion(
            **asked(script), response_model=City, max_retries=0, max_tokens=400
        )
        same(f"{mode}", found.model_dump(), {"city": "Paris", "days": 2})
        same(f"{mode} the tokens", whole.usage.completion_tokens, ground.tokens(script))
    client = instructor.from_openai(plain)
    first = client.chat.completions.create(**asked("first"), response_model=None)
    said = first.choices[0].message
    same("the first answer", said.content, ground.text("first"))
    turns = [*asked("first")["messages"], {"role": "assistant", "content": said.content}, *asked("second")["messages"]]
    second = client.chat.completions.create(**{**asked("second"), "messages": turns}, response_model=None)
    same("the second answer", second.choices[0].message.content, ground.text("second"))
    thought = client.chat.completions.create(**asked("thought"), response_model=None).choices[0].message
    same("the thought", (thought.reasoning_content, thought.content), (THOUGHT, "Seven."))
    # The names of the classes are those of the tools.
    either = create_model("weather", city=(str, ...), days=(int, ...)) | create_model("clock", zone=(str, ...))
    parallel = instructor.from_openai(plain, mode=modes.PARALLEL_TOOLS)
    both = parallel.chat.completions.create(**asked("tools"), response_model=Iterable[either], max_retries=0)
    same("two tools at once", [(type(call).__name__, call.model_dump()) for call in both], ARGUMENTS)
    # A call that is no JSON is an error once all tries are used up; a forced call is JSON.
    broken = lambda: parallel.chat.completions.create(**asked("broken"), response_model=Iterable[either], max_retries=0)
    raised(Exception, lambda: list(broken()), "JSON")
    left = plain.chat.completions.create(**asked("long"), stream=True)
    next(left), next(left)
    left.close()
    flood = {**asked("first"), "messages": [{"role": "user", "content": FLOOD}]}
    call = lambda: client.chat.completions.create(**flood, response_model=City, max_retries=0)
    raised(Exception, call, "context")
    ground.nothing_runs("instructor")


def litellm(ground):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}},
    ]

    def ask(name, prefix="openai/", more=(), **options):
        return send(prefix, [*more, {"role": "user", "content": QUESTION.format(name)}], **options)

    def send(prefix, messages, **options):
        base = {"openai/": f"{ground.url}/v1", "anthropic/": ground.url, "ollama_chat/": ground.url}[prefix]
        return litellm.completion(
            model=prefix + ground.model, api_base=base, api_key=ground.token, messages=messages, temperature=0,
            num_retries=0, **{"max_tokens": 3000, **options},
        )

    for prefix in ("openai/", "anthropic/", "ollama_chat/"):
        first = ask("first", prefix)
        said = first.choices[0].message.content
        same(f"{prefix} the first answer", said, ground.text("first"))
        same(f"{prefix} its tokens", first.usage.completion_tokens, ground.tokens("first"))
        history = [{"role": "user", "content": QUESTION.format("first")}, {"role": "assistant", "content": said}]
        second = ask("second", prefix, history)
        same(f"{prefix} the second answer", second.choices[0].message.content, ground.text("second"))
        message = ask("tools", prefix, tools=tools).choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        same(f"{prefix} the calls", calls, ARGUMENTS)
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": text}
            for call, text in zip(message.tool_calls, ("21 degrees", "noon"))
        ]
        asked = {"role": "user", "content": QUESTION.format("tools")}
        behind = send(prefix, [asked, message.model_dump(exclude_none=True), *results], tools=tools)
        same(f"{prefix} the answer behind them", behind.choices[0].message.content, ground.text("results"))
        stopped = ask("first", prefix, stop=["seven"]).choices[0].message.content
        same(f"{prefix} a stopped answer", stopped.rstrip(), ground.text("first").split("seven")[0].rstrip())
        # Ollama's dialect has no choice of tools.
        if prefix != "ollama_chat/":
            forced = ask("tools", prefix, tools=tools, tool_choice="required").choices[0].message.tool_calls[0]
            same(f"{prefix} a forced call", (forced.function.name, json.loads(forced.function.arguments)), ARGUMENTS[0])
        # Ollama's dialect and Anthropic's think where they are asked to.
        thinks = {"anthropic/": {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "ollama_chat/": {"think": True}}
        thought = ask("thought", prefix, allowed_openai_params=["thinking"], **thinks.get(prefix, {})).choices[0].message
        found = ((thought.reasoning_content or "").strip(), thought.content.strip())
        same(f"{prefix} the thought", found, (THOUGHT, "Seven."))
        stream = ask("long", prefix, stream=True)
        next(stream), next(stream)
        getattr(stream.completion_stream, "response", stream.completion_stream).close()
        ground.nothing_runs(f"litellm {prefix}")
        error = raised(litellm.BadRequestError, lambda: ask("first" + FLOOD, prefix), "context")
        same(f"{prefix} the status of an overflow", error.status_code, 400)
    broken = ask("broken", tools=tools).choices[0].message
    same("a broken call", broken.tool_calls[0].function.arguments, '{"city": Paris}')
    raised(litellm.ContextWindowExceededError, lambda: ask("first" + FLOOD))
    # The other dialects have no place for a call whose arguments are no object: it stays a text.
    for prefix in ("anthropic/", "ollama_chat/"):
        broken = ask("broken", prefix, tools=tools).choices[0].message
        expect(not broken.tool_calls and "Paris" in broken.content, prefix, "a broken call", broken)


LIBRARIES = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "langchain": langchain,
    "llama-index": llama_index,
    "instructor": instructor,
    "litellm": litellm,
}


def main():
    parser = argparse.ArgumentParser()
    for name in ("url", "token", "scripts", "libraries", "models"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    with open(options.scripts) as file:
        scripts = json.load(file)
    for library in options.libraries.split(","):
        for model in options.models.split(","):
            begun = time.monotonic()
            LIBRARIES[library](Ground(options.url, options.token, model, scripts))
            print(library, model, flush=True)
            print(f"{library} {model}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
