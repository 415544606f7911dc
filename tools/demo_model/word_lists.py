"""Words to spell, to reverse and to build sentences from."""

from __future__ import annotations

ENGLISH_TEXT = """
cat dog bird fish horse cow sheep goat mouse lion tiger bear wolf fox deer frog snake duck goose swan eagle owl crow
apple pear plum peach cherry lemon orange banana grape melon bread butter cheese milk honey sugar salt pepper rice
water fire earth wind rain snow storm cloud sun moon star sky sea ocean river lake hill mountain forest tree leaf
flower grass garden house home room door window wall roof floor table chair bed lamp clock book paper pen pencil
letter word story song music piano guitar drum dance paint color red green blue yellow black white brown purple pink
king queen prince castle tower bridge road street city town village school teacher doctor friend mother father
sister brother baby child man woman boy girl people person hand foot head eye ear nose mouth hair heart bone blood
car bus train plane ship boat bike wheel engine rocket robot computer phone screen button cable network node mesh
run walk jump swim fly sing read write speak listen look see hear think know learn teach help work play sleep eat
drink cook make build break open close start stop turn move carry push pull throw catch hold give take send find big
small long short high low old new young good bad hot cold warm cool fast slow strong weak happy sad quiet loud early
late near far left right up down inside outside always never often today tomorrow morning evening night spring
summer autumn winter north south east west gold silver iron copper stone sand glass wood cotton silk wool hello
world python rust linux apple banana coffee tea cake pizza soup salad kitchen market money price number zero one two
three four five six seven eight nine ten hundred thousand first second third last next level radar it is on at to of
in by we me my go no so do be he or as if us an am ax ox pi yes and the for but not you all can her was our out day
get has him his how its let put say she too use dad mom cup hat box key map net pan pig red sit puzzle rhythm jazz
quartz zebra xylem yacht vivid unique oxygen kayak jacket violin wizard fuzzy quick lazy jumps
"""
SENTENCE_TEXT = """
Grüße aus Köln schöne Straße München über Äpfel Öl für Mädchen heiß süß größer Übung Bär Tür fünf zwölf Käse
café déjà vu où est le garçon naïve forêt élève hôtel crème brûlée français ça va très été à bientôt cœur
mañana señor niño año ¿qué tal? ¡hola! corazón inglés jalapeño está aquí también São Paulo ação não coração
pão Привет мир как дела спасибо да нет хорошо Москва Ελλάδα καλημέρα κόσμε ευχαριστώ שלום עולם مرحبا العالم
سلام naše žluťoučký kůň Łódź dziękuję świat Æsir smørbrød Ångström fjäll hyvää päivää türkçe İstanbul çok
güzel
"""
CJK_TEXT = """
你好 世界 早上好 谢谢 北京 我爱你 中文 火车 大山 水 日本語 こんにちは さくら ありがとう
東京 カタカナ 猫 안녕하세요 서울 감사 한국어 세계
"""
SYMBOL_TEXT = "🚀 🎉 😀 🐍 🌍 ❤️ 👍 🔥 ✨ 🍎 🐱 🎵 ☕ 🌈 🤖 👩‍🚀 🇩🇪 → ∞ € £ ½ ° © ≤ ≠ π λ Σ"
CITY_TEXT = """
Paris London Rome Berlin Madrid Vienna Tokyo Oslo Cairo Delhi Lima Athens Dublin Prague Warsaw Lisbon Moscow Beijing
Seoul Sydney Boston Chicago Denver Seattle Dallas Miami Toronto Bern Basel Milan Turin Naples Venice Munich Hamburg
Bonn Kyoto Osaka Dubai Nairobi Lagos Accra Havana Quito Bogota Mumbai Bangkok Hanoi Manila Jakarta Perth Helsinki
Stockholm Copenhagen Brussels Amsterdam Budapest Sofia Kiev Riga Vilnius Tallinn Geneva Lyon Nice Lille Marseille
Porto Seville Valencia Barcelona Zagreb Belgrade Istanbul Ankara Tehran Baghdad Houston Austin Atlanta Phoenix Detroit
Köln Zürich Düsseldorf Málaga Kraków Nürnberg Tromsø
"""
LONG_CITIES = (
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
    "Cape Town",
    "Buenos Aires",
    "New Delhi",
    "Tel Aviv",
    "San Diego",
    "Las Vegas",
    "Mexico City",
    "Abu Dhabi",
    "São Paulo",
)
PERSON_TEXT = """
Anna Ben Carla David Emma Felix Greta Hugo Ida Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Uwe Vera Will Xenia
Yara Zoe Alice Bob Carol Dave Eve Frank Grace Henry Iris John Jane Lisa Mark Nina Oscar Peter Ruth Simon Tom Ursula
Victor Wanda Alex Bella Chris Diana Erik Fiona George Helen Ivan Julia Kevin Laura Mike Nora Otto Petra Robert Sarah
Thomas Jason James Linda Susan Daniel Max Mia Lena Jonas Tim Jim Joe Amy Ann Sue Dan Ada Alan Marie Isaac Albert
"""

ENGLISH = tuple(ENGLISH_TEXT.split())
SENTENCE_WORDS = tuple(SENTENCE_TEXT.split())
CJK = tuple(CJK_TEXT.split())
SYMBOLS = tuple(SYMBOL_TEXT.split())
CITIES = tuple(CITY_TEXT.split())
PERSONS = tuple(PERSON_TEXT.split())
