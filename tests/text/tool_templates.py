"""Chat templates with tools and thoughts, written in the manner of known families."""

_CALLS = (
    "{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if thought and loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ text }}"
    + _CALLS
    + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% if messages[0].role == 'system' %}{% set said = messages[0].content | trim %}{% set messages = messages[1:] %}"
    "{% else %}{% set said = '' %}{% endif %}<|head|>system<|/head|>\n\nToday: {{ date_string }}\n\n{{ said }}<|eot|>"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '<|head|>assistant<|/head|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot|>"
    "{% elif m.role in ('tool', 'ipython') %}<|head|>ipython<|/head|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% else %}<|head|>{{ m.role }}<|/head|>\n\n{% if loop.first and tools %}{% for tool in tools %}"
    "{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {{ ns.system if m == users[-1] else '' }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[CALLS][{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% endfor %}]</s>'
    '{% elif m.role == \'tool\' %}[RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/RESULTS]'
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' and m.content %}"
    "{% set text = m.content %}{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "<|Assistant|>{{ text }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
PHI = (
    "{% for m in messages %}{% if m.role == 'system' and m.tools %}"
    "<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% set ns = namespace(tool='') %}"
    "{% if messages[0].role in ('developer', 'system') %}<|start|>developer<|message|># Instructions\n\n"
    "{{ messages[0].content }}<|end|>{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>{% set ns.tool = call.name %}"
    "{% elif m.role == 'assistant' %}{% if m.thinking and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.tool }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PARTS = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
FAMILIES = {
    "Qwen": QWEN,
    "Llama": LLAMA,
    "Mistral": MISTRAL,
    "R1": R1,
    "Phi": PHI,
    "Harmony": HARMONY,
    "Gemma": PARTS,
}
